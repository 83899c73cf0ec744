//! What protection costs a guest: not a test, but the table that the project is judged by. It is
//! printed by `cargo test --release --package ringfence --test guests -- --ignored --nocapture
//! speed::`, and wants a machine to itself.

use serde_json::Value;

use crate::{
    place::Place,
    qemu::{Iommu, Qemu},
};

const SCRIPT: &str = r#"
modprobe virtio_blk
# The first run brings caches and clocks to where they stay.
for round in warm a b c; do
    run_fio $round --rw=randread --bs=4k --iodepth=32 --time_based --runtime=3 --size=128m
done
"#;

/// The median of the rounds' IOPS.
fn iops(said: &crate::machine::Said) -> f64 {
    let of = |report: Value| report["jobs"][0]["read"]["iops"].as_f64().unwrap();
    let mut rounds: Vec<f64> = ["a", "b", "c"].into_iter().map(|r| of(said.json(r))).collect();
    rounds.sort_by(f64::total_cmp);
    rounds[1]
}

#[derive(Clone, Copy, Debug)]
enum Disk {
    /// QEMU's, in its own process, which looks translations up in its own memory.
    Qemu,
    /// Ours.
    Ours,
    /// Ours, asking for one translation at a time.
    OneMiss,
}

fn measured(iommu: Iommu, disk: Disk) -> f64 {
    let place = Place::new();
    let image = place.image("image", 128);
    if let Disk::Qemu = disk {
        return iops(&Qemu::new(iommu).own_blk(&image, 1).start(&place, SCRIPT).end());
    }
    let path = image.to_str().unwrap();
    let mut arguments = vec!["blk", "--image", path];
    if let Disk::OneMiss = disk {
        arguments.extend(["--iotlb-misses", "1"]);
    }
    let back = place.service("blk.sock", &arguments);
    iops(&Qemu::new(iommu).blk(&back.socket, 1, "").start(&place, SCRIPT).end())
}

#[test]
#[ignore = "measures, and takes minutes: see above"]
fn table() {
    println!("random reads of 4 KiB, depth 32, median of three rounds of 3 s, IOPS in the guest");
    println!("{:14} {:>10} {:>10} {:>10}", "", "qemu", "ours", "one miss");
    for iommu in [Iommu::None, Iommu::IntelStrict, Iommu::IntelLazy, Iommu::VirtioStrict] {
        let row = [Disk::Qemu, Disk::Ours, Disk::OneMiss].map(|disk| measured(iommu, disk));
        println!(
            "{:14} {:10.0} {:10.0} {:10.0}   ours/qemu {:.2}, ours/one miss {:.2}",
            iommu.to_string(),
            row[0],
            row[1],
            row[2],
            row[1] / row[0],
            row[1] / row[2]
        );
    }
}
