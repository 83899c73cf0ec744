//! Disks that take turns in guests of one QEMU with as many virtual CPUs as the table is for:
//! `ringfence guard`'s, with its own IOMMU; and behind QEMU's virtio-iommu QEMU's own, that of
//! `ringfence blk`, and one that does nothing, [`null`], which shows how much of QEMU's speed
//! remains when another process must be asked at all. With as many virtual CPUs as this machine has
//! CPUs, none is left for the back ends: that is how hosts run.
//!
//! And without an IOMMU QEMU's own, that of `ringfence blk`, and the same behind `ringfence proxy`.
//!
//! `cargo xtask bench-guest` runs these.

use ringfence_lab::stats::Estimate;
use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::File,
    path::{Path, PathBuf},
    slice,
};

use super::{calls::Calls, medians, null, switches, tasks, threads};
use crate::{
    machine::Guest,
    place::{Guard, Place, Service},
    qemu::{Iommu, Qemu},
};

/// The first round warms up.
const ROUNDS: usize = 7;
/// The size of each disk, all of which is read and written.
const MIB: u64 = 64;

/// What a guest does in a round: a name, and fio's options or the name of a workload without fio.
const JOBS: [(&str, &str); 5] = [
    ("4 KiB reads, one at a time", "--rw=randread --bs=4k --iodepth=1"),
    ("4 KiB reads, 16 at a time", "--rw=randread --bs=4k --iodepth=16"),
    ("128 KiB reads, 4 at a time", "--rw=randread --bs=128k --iodepth=4"),
    ("4 KiB writes with O_DSYNC", "--rw=randwrite --bs=4k --iodepth=1 --sync=dsync"),
    ("stress-ng's iomix on ext4", "iomix"),
];

const SCRIPT: &str = r#"
load virtio_blk
modprobe ext4
say domain $(domain $(virtio_pci 2 0))
turn() {
    if [ "$2" = iomix ]; then
        mke2fs /dev/vda > /dev/null
        mount -t ext4 /dev/vda /mnt
    fi
    hear
    say run $1
    if [ "$2" = iomix ]; then iomix; else
        fio --filename=/dev/vda --direct=1 --ioengine=io_uring --output-format=json --eta=never \
            --output=/tmp/out --name=$1 --time_based --runtime=1 --size=MIBm $2
    fi
    say ran $1
    if [ "$2" = iomix ]; then umount /mnt; fi
    give $1 < /tmp/out
}
ios() { awk '{ print $1 + $5 }' /sys/block/vda/stat; }
# Its result in the form of fio's: operations a second, and what came of them at the disk.
iomix() {
    ios=$(ios)
    stress-ng --iomix 1 --iomix-bytes 1m --timeout 4 --metrics --temp-path /mnt > /tmp/iomix 2>&1
    sync
    awk -v ios=$(($(ios) - ios)) '$4 == "iomix" { rate = $9 } END {
        printf "{\"jobs\": [{\"error\": 0, \"write\": {\"iops\": 0, \"total_ios\": 0},"
        printf "\"read\": {\"iops\": %s, \"total_ios\": %d}}]}\n", rate, ios }' /tmp/iomix > /tmp/out
}
for round in $(seq 0 $((ROUNDS - 1))); do
TURNS
done
"#;

/// The metrics of our process.
const FIGURES: [&str; 5] = [
    "iommu_requests_total",
    "iommu_syncs_total",
    "iotlb_misses_total",
    "waits_total",
    "interrupts_total",
];

/// Context switches of all threads of QEMU and of the back end, and their system calls, which are
/// counted during the warm-up: counting them takes time.
const SWITCHES: &str = "switches";
const CALLS: &str = "calls";
/// How often the back end's threads slept.
const WAKE_UPS: &str = "wake-ups";

type Spent = (BTreeMap<String, f64>, BTreeMap<&'static str, f64>);

/// The server of a guest's disk.
enum Back {
    Qemu,
    Guard(Guard),
    Blk(Service),
    /// The proxy, and the back end behind it.
    Proxy([Service; 2]),
    Null,
}

impl Back {
    /// A file system needs the data that it has written.
    fn jobs(&self) -> &'static [(&'static str, &'static str)] {
        match self {
            Back::Null => &JOBS[..JOBS.len() - 1],
            _ => &JOBS,
        }
    }
}

struct Row {
    name: &'static str,
    guest: Guest,
    back: Back,
    /// CPU time in microseconds, and counts, of each turn: a job of a round.
    spent: BTreeMap<(usize, usize), Spent>,
}

impl Row {
    fn new(name: &'static str, machine: Qemu, place: &Place, back: Back) -> Row {
        let turn =
            |(job, (_, options)): (usize, &(_, _))| format!("turn $round.{job} '{options}'\n");
        let turns: String = back.jobs().iter().enumerate().map(turn).collect();
        let script = SCRIPT.replace("ROUNDS", &ROUNDS.to_string()).replace("TURNS", &turns);
        let script = script.replace("MIB", &MIB.to_string());
        let guest = machine.iomix().called(name).start(place, &script);
        Row { name, guest, back, spent: BTreeMap::new() }
    }

    /// Our processes, the one that QEMU speaks to first.
    fn ours(&self) -> &[Service] {
        match &self.back {
            Back::Qemu | Back::Null => &[],
            Back::Guard(Guard { service, .. }) | Back::Blk(service) => slice::from_ref(service),
            Back::Proxy(services) => services,
        }
    }

    /// The threads of the back end.
    fn backs_tasks(&self) -> Vec<u32> {
        match &self.back {
            Back::Null => tasks(std::process::id(), |name| name == null::NAME),
            _ => self.ours().iter().flat_map(|service| tasks(service.id(), |_| true)).collect(),
        }
    }

    /// The threads of the back end and of QEMU.
    fn tasks(&self) -> Vec<u32> {
        [tasks(self.guest.id(), |_| true), self.backs_tasks()].concat()
    }

    fn spent(&self) -> Spent {
        let mut cpu = BTreeMap::new();
        threads(self.guest.id(), "qemu", &mut cpu);
        if let Back::Null = self.back {
            let mut own = BTreeMap::new();
            threads(std::process::id(), "test", &mut own);
            cpu.extend(own.into_iter().filter(|(name, _)| name.ends_with(null::NAME)));
        }
        let [asleep, _] = switches(&self.backs_tasks());
        let [slept, lost] = switches(&self.tasks());
        let mut counted = BTreeMap::from([(SWITCHES, slept + lost), (WAKE_UPS, asleep)]);
        for service in self.ours() {
            threads(service.id(), "ours", &mut cpu);
        }
        if let Some(service) = self.ours().first() {
            let page = service.figures();
            for name in FIGURES {
                let full = format!("ringfence_{name}");
                if page.contains(&full) {
                    counted.insert(name, service.figure(&full));
                }
            }
        }
        (cpu, counted)
    }

    /// One job of a round, and its cost.
    fn turn(&mut self, round: usize, job: usize) {
        self.guest.say("go on");
        self.guest.hear(&format!("run {round}.{job}"));
        let (cpu, counted) = self.spent();
        let calls = (round == 0).then(|| Calls::of(&self.tasks()));
        self.guest.hear(&format!("ran {round}.{job}"));
        let calls = calls.map(|calls| calls.and_then(Calls::count));
        let (cpu_after, counted_after) = self.spent();
        self.guest.hear(&format!("end {round}.{job}"));
        let more = |(name, after): (String, f64)| {
            let before = cpu.get(&name).copied().unwrap_or(0.0);
            (name, 1e6 * (after - before))
        };
        let cpu = cpu_after.into_iter().map(more).collect();
        let more = |(name, after)| (name, after - counted[name]);
        let mut counted: BTreeMap<_, _> = counted_after.into_iter().map(more).collect();
        match calls {
            Some(Ok(calls)) => drop(counted.insert(CALLS, calls)),
            Some(Err(error)) => eprintln!("system calls are not counted: {error}"),
            None => {}
        }
        self.spent.insert((round, job), (cpu, counted));
    }

    /// Ends the guest; returns the results of its jobs.
    fn end(self, iommu: Iommu) -> (&'static str, Vec<Found>) {
        let Row { name, guest, back, mut spent } = self;
        let output = guest.end();
        assert_eq!(output.word("domain"), iommu.domain());
        let found = |job: usize| {
            let mut found = Found::default();
            for round in 0..ROUNDS {
                let done = &output.json(&format!("{round}.{job}"))["jobs"][0];
                assert_eq!(done["error"], 0, "{done:#}");
                let sum = |key: &str| {
                    ["read", "write"]
                        .map(|way| done[way][key].as_f64().unwrap())
                        .iter()
                        .sum::<f64>()
                };
                let (mut cpu, mut figures) = spent.remove(&(round, job)).unwrap();
                cpu.values_mut().for_each(|spent| *spent /= sum("total_ios"));
                figures.values_mut().for_each(|count| *count /= sum("total_ios"));
                if round == 0 {
                    found.calls = figures.get(CALLS).copied();
                    continue;
                }
                found.iops.push(sum("iops"));
                found.cpu.push(cpu);
                found.figures.push(figures);
            }
            found
        };
        let found = (0..back.jobs().len()).map(found).collect();
        match back {
            Back::Qemu | Back::Null => {}
            Back::Guard(Guard { service, .. }) | Back::Blk(service) => service.terminate(),
            Back::Proxy(services) => services.into_iter().for_each(Service::terminate),
        }
        (name, found)
    }
}

/// The results of a job in all rounds but the first, and its system calls an I/O in the first.
#[derive(Default)]
struct Found {
    calls: Option<f64>,
    iops: Vec<f64>,
    cpu: Vec<BTreeMap<String, f64>>,
    figures: Vec<BTreeMap<&'static str, f64>>,
}

fn interval(values: Option<Estimate>) -> String {
    let Some(estimate) = values else { return String::new() };
    let (lo, hi) = estimate.lo.zip(estimate.hi).expect("several rounds");
    format!("{:.2} [{lo:.2}, {hi:.2}]", estimate.median)
}

/// The image of a disk.
fn image(memory: &tempfile::TempDir, name: &str) -> PathBuf {
    let path = memory.path().join(name);
    File::create(&path).unwrap().set_len(MIB << 20).unwrap();
    path
}

/// A place in memory for images, so that this machine's disk is not measured: QEMU and we read and write them alike.
fn memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").expect("a file system in memory")
}

fn blk(place: &Place, socket: &str, image: &Path) -> Service {
    place.service(socket, &["blk", "--image", image.to_str().unwrap()])
}

/// `ringfence guard` and disks behind QEMU's IOMMU.
fn behind_iommus(guarded: Iommu, own: Iommu, cpus: u32) {
    let (place, memory) = (Place::new(), memory());
    let images = ["guard", "qemu", "blk"].map(|name| image(&memory, name));
    // More of its options, for trying by hand.
    let more = std::env::var("RINGFENCE_GUARD").unwrap_or_default();
    let disk = format!("{}={}", place.path("disk.sock").display(), images[0].display());
    let options = ["--blk", &disk].into_iter().chain(more.split_whitespace());
    let guard = place.guard(&options.collect::<Vec<_>>());
    let service = blk(&place, "blk.sock", &images[2]);
    let socket = place.path("null.sock");
    null::start(&socket, MIB);
    let behind_qemus = || Qemu::new(own).newer();
    let machines = vec![
        ("qemu", behind_qemus().own_blk(&images[1], 1, ""), Back::Qemu),
        ("guard", Qemu::guarded(guarded, &guard), Back::Guard(guard)),
        ("blk", behind_qemus().blk(&service.socket, 1, ""), Back::Blk(service)),
        ("null", behind_qemus().blk(&socket, 1, ""), Back::Null),
    ];
    let mode = if own == Iommu::VirtioStrict { "strict" } else { "lazy" };
    table(&place, &format!("{mode}, virtual CPUs: {cpus}"), own, cpus, "null", machines);
}

/// Disks without an IOMMU, one of them behind `ringfence proxy`.
fn without_an_iommu(cpus: u32) {
    let (place, memory) = (Place::new(), memory());
    let images = ["qemu", "blk", "proxy"].map(|name| image(&memory, name));
    let direct = blk(&place, "blk.sock", &images[1]);
    let back = blk(&place, "back.sock", &images[2]);
    let proxy =
        place.service("proxy.sock", &["proxy", "--backend", back.socket.to_str().expect("UTF-8")]);
    let machine = || Qemu::new(Iommu::None).newer();
    let machines = vec![
        ("qemu", machine().own_blk(&images[0], 1, ""), Back::Qemu),
        ("blk", machine().blk(&direct.socket, 1, ""), Back::Blk(direct)),
        ("proxy", machine().blk(&proxy.socket, 1, ""), Back::Proxy([proxy, back])),
    ];
    table(&place, &format!("no IOMMU, virtual CPUs: {cpus}"), Iommu::None, cpus, "blk", machines);
}

/// A table of these machines, the first with QEMU's own disk; ratios are to that, and to the row `other`.
fn table(
    place: &Place,
    title: &str,
    iommu: Iommu,
    cpus: u32,
    other: &str,
    machines: Vec<(&'static str, Qemu, Back)>,
) {
    let row = |(name, machine, back): (_, Qemu, _)| {
        Row::new(name, machine.cpus(cpus).parallel(), place, back)
    };
    let mut rows: Vec<Row> = machines.into_iter().map(row).collect();
    for (round, job) in (0..ROUNDS).flat_map(|round| (0..JOBS.len()).map(move |job| (round, job))) {
        let rows = rows.iter_mut().filter(|row| job < row.back.jobs().len());
        rows.for_each(|row| row.turn(round, job));
    }
    let rows: Vec<_> = rows.into_iter().map(|row| row.end(iommu)).collect();
    print(title, other, &rows);
}

/// A table in Markdown on standard output; other results on standard error.
fn print(title: &str, other: &str, rows: &[(&str, Vec<Found>)]) {
    let of = |name| &rows.iter().find(|(row, _)| *row == name).expect("a row").1;
    let [qemu, compared] = [of("qemu"), of(other)];
    println!("### {title}\n");
    print!("| job | disk | I/O a second | of qemu | of {other} | CPU µs an I/O | requests | ");
    println!("wake-ups | interrupts | system calls | switches |");
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mut details = String::new();
    let mut ratios = vec![Vec::new(); rows.len()];
    for (job, (what, _)) in JOBS.iter().enumerate() {
        for ((name, found), ratios) in rows.iter().zip(&mut ratios) {
            let Some(found) = found.get(job) else { continue };
            let rate = Estimate::of(&found.iops).expect("rounds").median;
            let of = |other: &[Found]| Estimate::ratio(&found.iops, &other.get(job)?.iops);
            let [of_qemu, of_other] = [of(qemu), of(compared)];
            ratios.extend(of_qemu.map(|ratio| ratio.median));
            let (of_qemu, of_other) = (interval(of_qemu), interval(of_other));
            let costs = medians(&found.cpu);
            let all: f64 = costs.values().sum();
            let figures = medians(&found.figures);
            print!("| {what} | {name} | {rate:.0} | {of_qemu} | {of_other} | {all:.0} ");
            let counts = [
                figures.get("iommu_requests_total").or(figures.get("iotlb_misses_total")),
                figures.get(WAKE_UPS),
                figures.get("interrupts_total"),
                found.calls.as_ref(),
                figures.get(SWITCHES),
            ];
            for count in counts {
                print!("| {}", count.map_or(String::new(), |count| format!("{count:.1} ")));
            }
            println!("|");
            write!(details, "{what}, {name}:").unwrap();
            for (name, us) in costs.into_iter().filter(|(_, us)| *us >= 0.5) {
                write!(details, "  {name} {us:.1} µs").unwrap();
            }
            for (name, count) in figures {
                write!(details, "  {name} {count:.2}").unwrap();
            }
            details.push('\n');
        }
    }
    for ((name, _), ratios) in rows.iter().zip(ratios).skip(1) {
        let mean = ratios.iter().product::<f64>().powf(1.0 / ratios.len() as f64);
        println!("| geometric mean of {} | {name} | | {mean:.2} |{}", ratios.len(), " |".repeat(7));
    }
    eprintln!("an I/O, CPU time of each thread and counts of ours:\n{details}");
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn strict_1() {
    behind_iommus(Iommu::GuardStrict, Iommu::VirtioStrict, 1);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn strict_2() {
    behind_iommus(Iommu::GuardStrict, Iommu::VirtioStrict, 2);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn strict_4() {
    behind_iommus(Iommu::GuardStrict, Iommu::VirtioStrict, 4);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn lazy_1() {
    behind_iommus(Iommu::GuardLazy, Iommu::VirtioLazy, 1);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn lazy_2() {
    behind_iommus(Iommu::GuardLazy, Iommu::VirtioLazy, 2);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn lazy_4() {
    behind_iommus(Iommu::GuardLazy, Iommu::VirtioLazy, 4);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn no_iommu_1() {
    without_an_iommu(1);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn no_iommu_2() {
    without_an_iommu(2);
}

#[test]
#[ignore = "measures: cargo xtask bench-guest"]
fn no_iommu_4() {
    without_an_iommu(4);
}
