//! The cost of mapping for the NVMe driver in a guest: pinned page by page, in batches, and not at
//! all.

use std::collections::BTreeMap;

use super::{median, threads};
use crate::{
    nvme::{TAKE, machine},
    place::Place,
    qemu::Iommu,
};

const ROUNDS: usize = 4;
const SIZES: usize = 2;
const ROWS: usize = 4;

/// The results of a row in each round.
#[derive(Default)]
struct Row {
    iops: Vec<f64>,
    /// Microseconds an I/O: the driver's thread, map and unmap in it, and each of QEMU's threads.
    cpu: Vec<f64>,
    mapping: Vec<f64>,
    qemu: BTreeMap<String, Vec<f64>>,
    requests: Vec<f64>,
}

fn table(iommu: Iommu) {
    let place = Place::new();
    let script = "vfio-nvme $pci $group iops >&3";
    let mut guest = machine(iommu, &place).parallel().start(&place, &format!("{TAKE}\n{script}"));
    let mut rows: Vec<(String, Row)> = Vec::new();
    for turn in 0..SIZES * ROUNDS * ROWS {
        let name = guest.hear("run ").split_off(4);
        let mut before = BTreeMap::new();
        threads(guest.id(), "qemu", &mut before);
        let line = guest.hear("ran ");
        let mut after = BTreeMap::new();
        threads(guest.id(), "qemu", &mut after);
        let figures: Vec<f64> = line.split(' ').skip(1).map(|word| word.parse().unwrap()).collect();
        let [count, seconds, cpu, mapping, requests] = figures[..] else { panic!("{line}") };
        let at = rows.iter().position(|(other, _)| *other == name);
        let at = at.unwrap_or_else(|| {
            rows.push((name, Row::default()));
            rows.len() - 1
        });
        // The first round warms up.
        if turn % (ROUNDS * ROWS) < ROWS {
            continue;
        }
        let row = &mut rows[at].1;
        row.iops.push(count / seconds);
        row.cpu.push(cpu * 1e6 / count);
        row.mapping.push(mapping * 1e6 / count);
        row.requests.push(requests / count);
        for (thread, spent) in after {
            let spent = spent - before.get(&thread).copied().unwrap_or(0.0);
            row.qemu.entry(thread).or_default().push(spent * 1e6 / count);
        }
    }
    guest.end();
    println!("{iommu}: random reads, 16 at a time; medians of {} rounds", ROUNDS - 1);
    for chunk in rows.chunks(ROWS) {
        for (name, row) in chunk {
            let ratio = row.iops.iter().zip(&chunk[0].1.iops).map(|(a, b)| a / b).collect();
            println!(
                "{name:18} {:8.0} IOPS  {:5.2}x the first  requests to map {:5.2} an I/O; us an I/O: \
                 driver {:6.1}, of it map and unmap {:6.1}",
                median(row.iops.clone()),
                median(ratio),
                median(row.requests.clone()),
                median(row.cpu.clone()),
                median(row.mapping.clone()),
            );
            let costs = row.qemu.iter().map(|(thread, spent)| (thread, median(spent.clone())));
            let costs: Vec<String> = costs
                .filter(|(_, us)| *us >= 0.5)
                .map(|(thread, us)| format!("{thread} {us:.1}"))
                .collect();
            println!("    CPU time in us an I/O: {}", costs.join("  "));
        }
    }
}

#[test]
#[ignore = "measures: see above"]
fn intel() {
    table(Iommu::IntelStrict);
}

#[test]
#[ignore = "measures: see above"]
fn virtio() {
    table(Iommu::VirtioStrict);
}
