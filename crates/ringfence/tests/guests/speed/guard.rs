//! A disk and an IOMMU of `ringfence guard` against a disk in QEMU behind QEMU's own virtio-iommu, and
//! our disk behind that: three guests of one QEMU that take turns, each with as many virtual CPUs as the
//! table is for. As many as this machine has CPUs leave none for whoever serves them: that is how hosts
//! run.

use std::collections::BTreeMap;

use ringfence_lab::stats::Estimate;

use super::{medians, threads};
use crate::{
    machine::Guest,
    place::{Guard, Place, Service},
    qemu::{Iommu, Qemu},
};

/// The first round warms up.
const ROUNDS: usize = 7;

/// What a guest does in a round: a name, and fio's options.
const JOBS: [(&str, &str); 5] = [
    ("4 KiB reads, one at a time", "--rw=randread --bs=4k --iodepth=1"),
    ("4 KiB reads, 16 at a time", "--rw=randread --bs=4k --iodepth=16"),
    ("128 KiB reads, 4 at a time", "--rw=randread --bs=128k --iodepth=4"),
    ("4 KiB writes with O_DSYNC", "--rw=randwrite --bs=4k --iodepth=1 --sync=dsync"),
    ("4 to 64 KiB, both ways, 4 jobs", "--rw=randrw --bsrange=4k-64k --iodepth=4 --numjobs=4"),
];

const SCRIPT: &str = r#"
load virtio_blk
say domain $(domain $(virtio_pci 2 0))
turn() {
    hear
    say run $1
    fio --filename=/dev/vda --direct=1 --ioengine=io_uring --output-format=json --eta=never \
        --output=/tmp/out --name=$1 --group_reporting --time_based --runtime=1 --size=64m $2
    say ran $1
    give $1 < /tmp/out
}
for round in $(seq 0 $((ROUNDS - 1))); do
TURNS
done
"#;

/// What our process has counted.
const FIGURES: [&str; 5] = [
    "iommu_requests_total",
    "iommu_syncs_total",
    "iotlb_misses_total",
    "waits_total",
    "interrupts_total",
];

type Spent = (BTreeMap<String, f64>, BTreeMap<&'static str, f64>);

struct Row {
    name: &'static str,
    guest: Guest,
    guard: Option<Guard>,
    service: Option<Service>,
    /// CPU time in microseconds, and counts, of each turn: a job of a round.
    spent: BTreeMap<(usize, usize), Spent>,
}

impl Row {
    fn new(
        name: &'static str,
        machine: Qemu,
        place: &Place,
        guard: Option<Guard>,
        service: Option<Service>,
    ) -> Row {
        let turn =
            |(job, (_, options)): (usize, &(_, _))| format!("turn $round.{job} '{options}'\n");
        let turns: String = JOBS.iter().enumerate().map(turn).collect();
        let script = SCRIPT.replace("ROUNDS", &ROUNDS.to_string()).replace("TURNS", &turns);
        let guest = machine.called(name).start(place, &script);
        Row { name, guest, guard, service, spent: BTreeMap::new() }
    }

    fn ours(&self) -> Option<&Service> {
        self.guard.as_ref().map(|guard| &guard.service).or(self.service.as_ref())
    }

    fn spent(&self) -> Spent {
        let mut cpu = BTreeMap::new();
        threads(self.guest.id(), "qemu", &mut cpu);
        let mut counted = BTreeMap::new();
        if let Some(service) = self.ours() {
            threads(service.id(), "ours", &mut cpu);
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

    /// One job of a round, and what it cost.
    fn turn(&mut self, round: usize, job: usize) {
        self.guest.say("go on");
        self.guest.hear(&format!("run {round}.{job}"));
        let (cpu, counted) = self.spent();
        self.guest.hear(&format!("ran {round}.{job}"));
        let (cpu_after, counted_after) = self.spent();
        self.guest.hear(&format!("end {round}.{job}"));
        let more = |(name, after): (String, f64)| {
            let before = cpu.get(&name).copied().unwrap_or(0.0);
            (name, 1e6 * (after - before))
        };
        let cpu = cpu_after.into_iter().map(more).collect();
        let more = |(name, after)| (name, after - counted[name]);
        self.spent.insert((round, job), (cpu, counted_after.into_iter().map(more).collect()));
    }

    /// Ends the guest; what its jobs found.
    fn end(self, iommu: Iommu) -> (&'static str, Vec<Found>) {
        let Row { name, guest, guard, service, mut spent } = self;
        let said = guest.end();
        assert_eq!(said.word("domain"), iommu.domain());
        let found = |job: usize| {
            let mut found = Found::default();
            for round in 1..ROUNDS {
                let done = &said.json(&format!("{round}.{job}"))["jobs"][0];
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
                found.iops.push(sum("iops"));
                found.cpu.push(cpu);
                found.figures.push(figures);
            }
            found
        };
        let found = (0..JOBS.len()).map(found).collect();
        guard.map(|guard| guard.service).or(service).into_iter().for_each(Service::terminate);
        (name, found)
    }
}

/// What a job found in all rounds but the first.
#[derive(Default)]
struct Found {
    iops: Vec<f64>,
    cpu: Vec<BTreeMap<String, f64>>,
    figures: Vec<BTreeMap<&'static str, f64>>,
}

fn interval(values: Option<Estimate>) -> String {
    let estimate = values.expect("rounds");
    let (lo, hi) = estimate.lo.zip(estimate.hi).expect("several rounds");
    format!("{:.2} [{lo:.2}, {hi:.2}]", estimate.median)
}

fn table(guarded: Iommu, own: Iommu, cpus: u32) {
    let place = Place::alone();
    let images = [0, 1, 2].map(|n| place.image(&format!("image{n}"), 64));
    // More of its options, to be tried by hand.
    let more = std::env::var("RINGFENCE_GUARD").unwrap_or_default();
    let disk = format!("{}={}", place.path("disk.sock").display(), images[0].display());
    let options = ["--blk", &disk].into_iter().chain(more.split_whitespace());
    let guard = place.guard(&options.collect::<Vec<_>>());
    let service = place.service("blk.sock", &["blk", "--image", images[2].to_str().unwrap()]);
    let machines = [
        Qemu::guarded(guarded, &guard),
        Qemu::new(own).newer().own_blk(&images[1], 1, ""),
        Qemu::new(own).newer().blk(&service.socket, 1, ""),
    ];
    let [guard_machine, qemu_machine, ours_machine] = machines.map(|machine| machine.cpus(cpus));
    let mut rows = [
        Row::new("guard", guard_machine, &place, Some(guard), None),
        Row::new("qemu", qemu_machine, &place, None, None),
        Row::new("blk", ours_machine, &place, None, Some(service)),
    ];
    for (round, job) in (0..ROUNDS).flat_map(|round| (0..JOBS.len()).map(move |job| (round, job))) {
        rows.iter_mut().for_each(|row| row.turn(round, job));
    }
    let rows = rows.map(|row| row.end(own));
    println!("{own}, {cpus} virtual CPUs; {} rounds", ROUNDS - 1);
    let mut product = [1.0; 3];
    for (job, (what, _)) in JOBS.iter().enumerate() {
        println!("{what}");
        let (_, qemu) = &rows[1];
        for ((name, found), product) in rows.iter().zip(&mut product) {
            let found = &found[job];
            let iops = Estimate::of(&found.iops).expect("rounds").median;
            let ratio = Estimate::ratio(&found.iops, &qemu[job].iops);
            *product *= ratio.expect("rounds").median;
            println!("    {name:6} {iops:8.0} IOPS  {}x qemu", interval(ratio));
            let costs = medians(&found.cpu);
            let all: f64 = costs.values().sum();
            let costs = costs.into_iter().filter(|(_, us)| *us >= 0.5);
            let costs: Vec<String> = costs.map(|(name, us)| format!("{name} {us:.1}")).collect();
            println!("        CPU time in us an I/O: {all:.0}: {}", costs.join("  "));
            let counts = medians(&found.figures).into_iter();
            let counts: Vec<String> = counts.map(|(name, n)| format!("{name} {n:.2}")).collect();
            if !counts.is_empty() {
                println!("        an I/O: {}", counts.join("  "));
            }
        }
    }
    let mean = product.map(|product: f64| product.powf(1.0 / JOBS.len() as f64));
    println!("geometric mean: guard {:.2}x qemu, blk {:.2}x qemu", mean[0], mean[2]);
}

#[test]
#[ignore = "measures: see above"]
fn strict_1() {
    table(Iommu::GuardStrict, Iommu::VirtioStrict, 1);
}

#[test]
#[ignore = "measures: see above"]
fn strict_2() {
    table(Iommu::GuardStrict, Iommu::VirtioStrict, 2);
}

#[test]
#[ignore = "measures: see above"]
fn strict_4() {
    table(Iommu::GuardStrict, Iommu::VirtioStrict, 4);
}

#[test]
#[ignore = "measures: see above"]
fn lazy_1() {
    table(Iommu::GuardLazy, Iommu::VirtioLazy, 1);
}

#[test]
#[ignore = "measures: see above"]
fn lazy_2() {
    table(Iommu::GuardLazy, Iommu::VirtioLazy, 2);
}

#[test]
#[ignore = "measures: see above"]
fn lazy_4() {
    table(Iommu::GuardLazy, Iommu::VirtioLazy, 4);
}
