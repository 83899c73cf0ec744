//! The NVMe driver in user space against QEMU's controller, behind an IOMMU of QEMU, over the VFIO
//! of a stock Linux: real DMA, as far as a guest has any.

use std::fs;

use crate::{
    machine::{Guest, Transcript},
    place::{Place, part},
    qemu::{Iommu, Qemu},
};

/// Takes the disk from the kernel's driver. `$pci` and `$group` are its address and its group then.
pub(crate) const TAKE: &str = r#"
# The kernel's own driver is built in; behind a virtio-iommu it waits for that.
await [ -b /dev/nvme0n1 ]
pci=$(basename $(readlink -f /sys/class/nvme/nvme0/device))
to_vfio $pci
drive() { vfio-nvme $pci $group $* > /tmp/nvme 2>&1 || { give nvme < /tmp/nvme; false; }; }
# Pages that the kernel has pinned for long and not let go again, by its own count.
pinned() {
    echo 1 > /proc/sys/vm/stat_refresh
    counts=$(sed -n 's/^nr_foll_pin_[a-z]* //p' /proc/vmstat)
    echo $(($(echo $counts | sed 's/ /-/')))
}
"#;

pub(crate) fn machine(iommu: Iommu, place: &Place) -> Qemu {
    let image = place.image("disk", 32);
    let program = fs::read(part("vfio-nvme")).unwrap();
    // QEMU 7.2's controller stalls with one processor.
    Qemu::new(iommu).cpus(2).nvme(&image).file("bin/vfio-nvme", program)
}

const DATA_AND_ISOLATION: &str = r#"
drive verify isolation
give nvme < /tmp/nvme
dmesg | grep -i -e dmar -e iommu | tail -40 | give log
"#;

/// Written data comes back under every policy, and unmapped memory cannot be accessed.
fn data_and_isolation(given: &Transcript) {
    let output = given.given("nvme");
    for policy in ["strict", "strict+map", "lazy-mq+map", "bounce", "auto"] {
        let verified = format!("verified {policy}");
        assert!(output.lines().any(|line| line == verified), "{verified}\n{output}");
    }
    assert!(output.contains("unmapped is out of reach"), "{output}");
    assert!(output.ends_with("mapped again is in reach\nover"), "{output}");
    // The IOMMU's own report of it has the address.
    let address =
        output.lines().find_map(|line| line.strip_prefix("address 0x")).expect("an address");
    let log = given.given("log");
    let fault = |line: &str| {
        let line = line.to_lowercase();
        line.contains("fault") && line.contains(address)
    };
    assert!(log.lines().any(fault), "no fault at {address}\n{log}");
}

const KILLED: &str = r#"
before=$(pinned)
holding() { grep -qs holding /tmp/nvme; }
for wait in 0 50000 200000; do
    # What the one before has printed is not this one's.
    rm -f /tmp/nvme
    vfio-nvme $pci $group hold > /tmp/nvme 2>&1 &
    driver=$!
    await holding
    usleep $wait
    during=$(pinned)
    locked=$(sed -n 's/^VmLck:[^0-9]*\([0-9]*\).*/\1/p' /proc/$driver/status)
    kill -9 $driver
    wait $driver || true
    say killed $before $during $locked $(pinned)
done
# At any point of its beginning too.
for wait in 3000 10000 30000 100000; do
    vfio-nvme $pci $group hold > /tmp/nvme 2>&1 &
    driver=$!
    usleep $wait
    kill -9 $driver
    wait $driver || true
    say early $(pinned)
done
# And the next one finds all in order.
drive isolation
"#;

/// A driver that is killed at any time leaves nothing pinned.
fn nothing_stays_pinned(guest: &mut Guest) {
    let mut clean = 0;
    for _ in 0..3 {
        let line = guest.hear("killed ");
        let counts: Vec<i64> =
            line.split(' ').skip(1).map(|word| word.parse().expect("a number")).collect();
        let [before, during, locked_kib, after] = counts[..] else { panic!("{line}") };
        // 32 MiB and more were pinned, and charged; then nothing. The kernel sums its counts while
        // the driver pins and unpins: they are not exact to the page.
        assert!(during - before >= 4096 && locked_kib >= 32 << 10, "{line}");
        assert_eq!(after, before, "{line}");
        clean = before;
    }
    for _ in 0..4 {
        assert_eq!(guest.hear("early "), format!("early {clean}"));
    }
}

/// In one machine, one after the other.
fn a_driver_works_and_is_killed(iommu: Iommu) {
    let place = Place::new();
    let script = format!("{TAKE}{DATA_AND_ISOLATION}{KILLED}");
    let mut guest = machine(iommu, &place).start(&place, &script);
    nothing_stays_pinned(&mut guest);
    data_and_isolation(&guest.end());
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn a_driver_works_and_is_killed_behind_intels_iommu() {
    a_driver_works_and_is_killed(Iommu::IntelStrict);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_driver_works_and_is_killed_behind_a_virtio_iommu() {
    a_driver_works_and_is_killed(Iommu::VirtioStrict);
}
