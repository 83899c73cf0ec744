//! The cost of protection in a guest: not tests, but the tables by which the project is judged.
//! Each is printed by `cargo test --release --package ringfence-cli --test guests -- --ignored
//! --nocapture --test-threads=1 speed::NAME`, takes under a minute, and needs a machine to itself.
//!
//! All disks of a table are in one guest, and take turns: what changes from one boot to the next,
//! or while a machine warms up, affects all of them.

mod calls;
mod guard;
mod null;
mod nvme;

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use crate::{
    machine::Guest,
    place::{Place, Service},
    qemu::{Iommu, Qemu},
};

/// How often every disk has its turn; the first round warms up caches and clocks.
const ROUNDS: usize = 4;

/// When a round of 1.5 s is not to end any more. QEMU's own disk on a thread of its own, behind its
/// intel-iommu, was once still waiting after ten minutes.
const HANGS: Duration = Duration::from_secs(120);

/// Runs each disk's rounds, and says when each begins and ends.
const SCRIPT: &str = r#"
load virtio_blk
disk() { ls /sys/bus/pci/devices/$(virtio_pci 2 $1)/virtio*/block; }
for round in $(seq 0 $((ROUNDS - 1))); do
    for n in $(seq 0 $((DISKS - 1))); do
        say run $round.$n
        fio --filename=/dev/$(disk $n) --direct=1 --ioengine=io_uring --output-format=json \
            --eta=never --output=/tmp/out --name=$round.$n --rw=randread --bs=4k \
            --time_based --runtime=1500ms --size=64m LOAD
        say ran $round.$n
        give $round.$n < /tmp/out
    done
done
"#;

/// The server of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    /// QEMU, in its own process, on its main loop: it looks translations up in its own memory.
    Qemu,
    /// The same, on a thread of its own.
    QemuThread,
    /// Ours.
    Ours,
    /// Ours, with one outstanding miss at a time.
    OneMiss,
}

/// The results of a disk in each round.
#[derive(Default)]
struct Row {
    iops: Vec<f64>,
    /// The cost of the round by thread: CPU time in microseconds an I/O.
    cpu: Vec<BTreeMap<String, f64>>,
    /// The metrics of our back end, per I/O.
    figures: Vec<BTreeMap<&'static str, f64>>,
}

const FIGURES: [&str; 7] = [
    "iotlb_misses_total",
    "iotlb_asks_total",
    "iotlb_asked_again_total",
    "iotlb_updates_total",
    "iotlb_invalidations_total",
    "waits_total",
    "interrupts_total",
];

/// CPU time of each thread of a process, by name, in seconds.
fn threads(pid: u32, process: &str, into: &mut BTreeMap<String, f64>) {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return };
    for task in tasks.flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let spent = read("schedstat");
        let ns = spent.split(' ').next().and_then(|word| word.parse::<f64>().ok());
        let name = format!("{process}/{}", read("comm").trim());
        *into.entry(name).or_default() += ns.unwrap_or(0.0) / 1e9;
    }
}

/// The threads of a process with a matching name.
fn tasks(pid: u32, fits: impl Fn(&str) -> bool) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let named = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        fits(name.trim()).then(|| task.file_name().to_str()?.parse().ok())?
    };
    tasks.flatten().filter_map(named).collect()
}

/// How often these threads have slept, and how often they have lost their CPU.
fn switches(tasks: &[u32]) -> [f64; 2] {
    let mut sum = [0.0; 2];
    for task in tasks {
        // A thread's own directory also exists under its number, though it is not listed.
        let status = std::fs::read_to_string(format!("/proc/{task}/status")).unwrap_or_default();
        let names = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
        for (sum, name) in sum.iter_mut().zip(names) {
            let count = status.lines().find_map(|line| line.strip_prefix(name));
            *sum += count.and_then(|count| count.trim().parse::<f64>().ok()).unwrap_or(0.0);
        }
    }
    sum
}

fn figures(service: Option<&Service>) -> BTreeMap<&'static str, f64> {
    let value = |name: &'static str| Some((name, service?.figure(&format!("ringfence_{name}"))));
    FIGURES.into_iter().filter_map(value).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn table(iommu: Iommu, load: &str, disks: &[Disk]) {
    let place = Place::new();
    let mut qemu = Qemu::new(iommu).parallel();
    let mut services = Vec::new();
    for (n, disk) in disks.iter().enumerate() {
        let image = place.image(&format!("image{n}"), 64);
        let more: &[&str] = if *disk == Disk::OneMiss { &["--iotlb-misses", "1"] } else { &[] };
        match disk {
            Disk::Qemu => qemu = qemu.own_blk(&image, 1, ""),
            Disk::QemuThread => qemu = qemu.thread("io").own_blk(&image, 1, ",iothread=io"),
            Disk::Ours | Disk::OneMiss => {
                let arguments = [&["blk", "--image", image.to_str().unwrap()], more].concat();
                let service = place.service(&format!("blk{n}.sock"), &arguments);
                qemu = qemu.blk(&service.socket, 1, "");
                services.push((n, service));
            }
        }
    }
    let script = SCRIPT
        .replace("LOAD", load)
        .replace("ROUNDS", &ROUNDS.to_string())
        .replace("DISKS", &disks.len().to_string());
    let mut guest = qemu.start(&place, &script);
    let mut rows: Vec<Row> = disks.iter().map(|_| Row::default()).collect();
    let spent = |guest: &Guest| {
        let mut all = BTreeMap::new();
        threads(guest.id(), "qemu", &mut all);
        services.iter().for_each(|(_, service)| threads(service.id(), "ours", &mut all));
        all
    };
    for round in 0..ROUNDS {
        for (n, row) in rows.iter_mut().enumerate() {
            let service = services.iter().find(|(of, _)| *of == n).map(|(_, service)| service);
            guest.hear(&format!("run {round}.{n}"));
            let (cpu, counted) = (spent(&guest), figures(service));
            if guest.hear_within(&format!("ran {round}.{n}"), HANGS).is_none() {
                let threads = guest.threads();
                assert_eq!(service.map(Service::log), None, "it hangs; QEMU's threads:\n{threads}");
                println!(
                    "{iommu}: {:?} hangs and is left out; QEMU's threads:\n{threads}",
                    disks[n]
                );
                drop(guest);
                return table(iommu, load, &[&disks[..n], &disks[n + 1..]].concat());
            }
            let (cpu_after, counted_after) = (spent(&guest), figures(service));
            if round > 0 {
                let more = |(name, after): (String, f64)| {
                    let before = cpu.get(&name).copied().unwrap_or(0.0);
                    (name, after - before)
                };
                row.cpu.push(cpu_after.into_iter().map(more).collect());
                let more = |(name, after)| (name, after - counted[name]);
                row.figures.push(counted_after.into_iter().map(more).collect());
            }
        }
    }
    let output = guest.end();
    for (n, row) in rows.iter_mut().enumerate() {
        for round in 1..ROUNDS {
            let job = &output.json(&format!("{round}.{n}"))["jobs"][0];
            assert_eq!(job["error"], 0, "{job:#}");
            let total = job["read"]["total_ios"].as_f64().unwrap();
            row.iops.push(job["read"]["iops"].as_f64().unwrap());
            row.cpu[round - 1].values_mut().for_each(|seconds| *seconds *= 1e6 / total);
            row.figures[round - 1].values_mut().for_each(|count| *count /= total);
        }
    }
    print(iommu, load, disks, &rows);
    for (_, service) in services {
        assert_eq!(service.figure("ringfence_iotlb_timeouts_total"), 0.0);
        service.terminate();
    }
}

/// The median of each name's values.
fn medians<K: Ord + Clone>(rounds: &[BTreeMap<K, f64>]) -> BTreeMap<K, f64> {
    let names: std::collections::BTreeSet<&K> = rounds.iter().flat_map(BTreeMap::keys).collect();
    let of = |name: &K| median(rounds.iter().filter_map(|r| r.get(name).copied()).collect());
    names.into_iter().map(|name| (name.clone(), of(name))).collect()
}

fn print(iommu: Iommu, load: &str, disks: &[Disk], rows: &[Row]) {
    println!("{iommu}: random reads of 4 KiB, {load}; IOPS in the guest, {} rounds", ROUNDS - 1);
    for (disk, row) in disks.iter().zip(rows) {
        let mut line = format!("{:11} {:8.0}", format!("{disk:?}"), median(row.iops.clone()));
        for (other, base) in disks.iter().zip(rows) {
            if other != disk {
                let ratio = row.iops.iter().zip(&base.iops).map(|(a, b)| a / b).collect();
                write!(line, "  {:.2}x {other:?}", median(ratio)).unwrap();
            }
        }
        println!("{line}");
        let mut line = String::new();
        for (name, us) in medians(&row.cpu).into_iter().filter(|(_, us)| *us >= 0.5) {
            write!(line, "  {name} {us:.1}").unwrap();
        }
        println!("    CPU time in us an I/O:{line}");
        let mut line = String::new();
        for (name, count) in medians(&row.figures) {
            write!(line, "  {} {count:.2}", name.trim_end_matches("_total")).unwrap();
        }
        if !line.is_empty() {
            println!("    an I/O:{line}");
        }
    }
}

const ALL: [Disk; 4] = [Disk::Qemu, Disk::QemuThread, Disk::Ours, Disk::OneMiss];
const DEEP: &str = "--iodepth=32";

#[test]
#[ignore = "measures: see above"]
fn without_an_iommu() {
    table(Iommu::None, DEEP, &ALL[..3]);
}

#[test]
#[ignore = "measures: see above"]
fn intel_strict() {
    table(Iommu::IntelStrict, DEEP, &ALL);
}

#[test]
#[ignore = "measures: see above"]
fn intel_lazy() {
    table(Iommu::IntelLazy, DEEP, &ALL);
}

#[test]
#[ignore = "measures: see above"]
fn virtio_strict() {
    table(Iommu::VirtioStrict, DEEP, &ALL);
}

#[test]
#[ignore = "measures: see above"]
fn virtio_lazy() {
    table(Iommu::VirtioLazy, DEEP, &ALL);
}

/// One request at a time: the cost of a miss cannot be hidden.
#[test]
#[ignore = "measures: see above"]
fn one_request_at_a_time() {
    table(Iommu::IntelStrict, "--iodepth=1", &ALL);
}
