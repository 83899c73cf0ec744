//! A disk and an IOMMU of `ringfence guard` against a disk in QEMU behind QEMU's own virtio-iommu, and
//! our disk behind that: three guests of one QEMU that take turns.

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

const SCRIPT: &str = r#"
load virtio_blk
say domain $(domain $(virtio_pci 2 0))
for round in $(seq 0 $((ROUNDS - 1))); do
    hear
    say run $round
    fio --filename=/dev/vda --direct=1 --ioengine=io_uring --output-format=json --eta=never \
        --output=/tmp/out --name=$round --rw=randread --bs=4k --iodepth=16 --time_based \
        --runtime=1 --size=64m
    say ran $round
    give $round < /tmp/out
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

struct Row {
    name: &'static str,
    guest: Guest,
    guard: Option<Guard>,
    service: Option<Service>,
    iops: Vec<f64>,
    /// CPU time in microseconds, and counts, of each round.
    cpu: Vec<BTreeMap<String, f64>>,
    figures: Vec<BTreeMap<&'static str, f64>>,
}

impl Row {
    fn new(
        name: &'static str,
        machine: Qemu,
        place: &Place,
        guard: Option<Guard>,
        service: Option<Service>,
    ) -> Row {
        let script = SCRIPT.replace("ROUNDS", &ROUNDS.to_string());
        let guest = machine.called(name).start(place, &script);
        Row { name, guest, guard, service, iops: vec![], cpu: vec![], figures: vec![] }
    }

    fn ours(&self) -> Option<&Service> {
        self.guard.as_ref().map(|guard| &guard.service).or(self.service.as_ref())
    }

    fn spent(&self) -> (BTreeMap<String, f64>, BTreeMap<&'static str, f64>) {
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

    /// One round; what it cost is kept, unless it is the first.
    fn round(&mut self, round: usize) {
        self.guest.say("go on");
        self.guest.hear(&format!("run {round}"));
        let (cpu, counted) = self.spent();
        self.guest.hear(&format!("ran {round}"));
        let (cpu_after, counted_after) = self.spent();
        self.guest.hear(&format!("end {round}"));
        if round > 0 {
            let more = |(name, after): (String, f64)| {
                let before = cpu.get(&name).copied().unwrap_or(0.0);
                (name, 1e6 * (after - before))
            };
            self.cpu.push(cpu_after.into_iter().map(more).collect());
            let more = |(name, after)| (name, after - counted[name]);
            self.figures.push(counted_after.into_iter().map(more).collect());
        }
    }

    /// Ends the guest; what it has found becomes a part of the row.
    fn end(self, iommu: Iommu) -> Ended {
        let Row { name, guest, guard, service, mut iops, mut cpu, mut figures } = self;
        let said = guest.end();
        assert_eq!(said.word("domain"), iommu.domain());
        for round in 1..ROUNDS {
            let job = &said.json(&round.to_string())["jobs"][0];
            assert_eq!(job["error"], 0, "{job:#}");
            let total = job["read"]["total_ios"].as_f64().unwrap();
            iops.push(job["read"]["iops"].as_f64().unwrap());
            cpu[round - 1].values_mut().for_each(|spent| *spent /= total);
            figures[round - 1].values_mut().for_each(|count| *count /= total);
        }
        guard.map(|guard| guard.service).or(service).into_iter().for_each(Service::terminate);
        Ended { name, iops, cpu, figures }
    }
}

struct Ended {
    name: &'static str,
    iops: Vec<f64>,
    cpu: Vec<BTreeMap<String, f64>>,
    figures: Vec<BTreeMap<&'static str, f64>>,
}

fn interval(values: Option<Estimate>) -> String {
    let estimate = values.expect("rounds");
    let (lo, hi) = estimate.lo.zip(estimate.hi).expect("several rounds");
    format!("{:.2} [{lo:.2}, {hi:.2}]", estimate.median)
}

fn table(guarded: Iommu, own: Iommu) {
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
    let [guard_machine, qemu_machine, ours_machine] = machines;
    let mut rows = [
        Row::new("guard", guard_machine, &place, Some(guard), None),
        Row::new("qemu", qemu_machine, &place, None, None),
        Row::new("blk", ours_machine, &place, None, Some(service)),
    ];
    for round in 0..ROUNDS {
        rows.iter_mut().for_each(|row| row.round(round));
    }
    let rows = rows.map(|row| row.end(own));
    println!("{own}: random reads of 4 KiB, 16 at a time; {} rounds", ROUNDS - 1);
    for row in &rows {
        let iops = Estimate::of(&row.iops).expect("rounds").median;
        let ratio = interval(Estimate::ratio(&row.iops, &rows[1].iops));
        println!("{:6} {iops:8.0} IOPS  {ratio}x qemu", row.name);
        let costs = medians(&row.cpu).into_iter().filter(|(_, us)| *us >= 0.5);
        let costs: Vec<String> = costs.map(|(name, us)| format!("{name} {us:.1}")).collect();
        println!("    CPU time in us an I/O: {}", costs.join("  "));
        let counts = medians(&row.figures).into_iter();
        let counts: Vec<String> = counts.map(|(name, n)| format!("{name} {n:.2}")).collect();
        if !counts.is_empty() {
            println!("    an I/O: {}", counts.join("  "));
        }
    }
}

#[test]
#[ignore = "measures: see above"]
fn strict() {
    table(Iommu::GuardStrict, Iommu::VirtioStrict);
}

#[test]
#[ignore = "measures: see above"]
fn lazy() {
    table(Iommu::GuardLazy, Iommu::VirtioLazy);
}
