//! What devices behind the IOMMU can access.

use ringfence_iommu::{FaultReason, Iova, Prot};
use ringfence_virtio_iommu::wire::{FaultRecord, MapFlags, Request, Status};
use ringfence_virtq::blk::Kind;

use crate::{
    common::Place,
    rig::{Disk, Iommu, PAGE, PLAIN, figure, figures, memory, started, wait_until},
};

const TWO: [&str; 4] = ["--blk", "a=a.img", "--blk", "b=b.img,untrusted"];
const A: u32 = 0x30;
const B: u32 = 0x38;

fn disks(place: &Place) {
    place.write("a.img", vec![0xaa; 1 << 16]);
    place.write("b.img", vec![0xbb; 1 << 16]);
}

#[test]
fn a_device_reaches_what_is_mapped_in_its_domain_and_nothing_else() {
    // rule V6, rule V14, rule V19, rule V20, rule V28
    let place = Place::new();
    disks(&place);
    let _running = started(&place, &TWO);
    let ram = memory();
    let mut iommu = Iommu::begin(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    let mut b = Disk::connect(&place, "b", &ram);
    a.start_in(&mut iommu, 1, A);
    b.start_in(&mut iommu, 2, B);
    assert!(a.works(1, a.page) && b.works(2, b.page));
    assert!(iommu.is_quiet());

    // Each in its own domain: mappings of one do not exist for the other.
    let (at, kept) = (a.page, a.bytes());
    assert!(!b.does(Kind::In, 0, at));
    let access = Prot::WRITE;
    let (reason, address) = (FaultReason::Mapping, Some(Iova(at)));
    assert_eq!(iommu.fault(), FaultRecord { reason, endpoint: B, access, address });
    assert_eq!(a.bytes(), kept);
    assert!(!a.does(Kind::Out, 0, b.page));
    let fault = iommu.fault();
    assert_eq!((fault.endpoint, fault.access), (A, Prot::READ));

    // A reply to UNMAP means that the mapping is gone; a reply to MAP, that it is there.
    iommu.unmap(1, a.page, PAGE);
    assert!(!a.does(Kind::In, 0, a.page));
    assert_eq!(iommu.fault().address, Some(Iova(a.page)));
    for round in 0..100 {
        let at = 0x10_0000 + round * PAGE;
        iommu.map(1, at, a.page, PAGE, MapFlags::READ | MapFlags::WRITE);
        assert!(a.works(round as u8, at));
        iommu.unmap(1, at, PAGE);
    }
    // Read-only for the device, which is enough for a write to the disk.
    iommu.map(1, 0x20_0000, a.page, PAGE, MapFlags::READ);
    assert!(a.does(Kind::Out, 0, 0x20_0000));
    assert!(!a.does(Kind::In, 0, 0x20_0000));
    assert_eq!(iommu.fault().access, Prot::WRITE);

    // Outside of any domain, an endpoint that may not bypass can access nothing.
    assert_eq!(iommu.request(Request::Detach { domain: 2, endpoint: B }), Status::Ok);
    b.stop();
    b.starts_away(&place, "07.0/0");

    let text = figures(&place);
    assert_eq!(figure(&text, "iommu_requests_total{kind=\"map\"}"), 4 + 100 + 1);
    assert_eq!(figure(&text, "iommu_requests_total{kind=\"unmap\"}"), 101);
    assert_eq!(figure(&text, "iommu_requests_total{kind=\"other\"}"), 3);
    assert_eq!(figure(&text, "iommu_domains"), 1);
    assert_eq!(figure(&text, "iommu_mappings"), 2);
    assert!(figure(&text, "iommu_table_bytes") > 0);
    assert_eq!(figure(&text, "iommu_faults_total{endpoint=\"0x30\"}"), 3);
    assert!(figure(&text, "iommu_faults_total{endpoint=\"0x38\"}") >= 2);
    assert_eq!(figure(&text, "iommu_dropped_faults_total"), 0);
    assert!(figure(&text, "requests_total{queue=\"06.0/0\"}") > 200);
    assert!(figure(&text, "failed_requests_total{queue=\"07.0/0\"}") > 0);
}

#[test]
fn firmware_uses_disks_before_there_is_a_driver_but_for_untrusted_ones() {
    // rule V5
    let place = Place::new();
    disks(&place);
    let running = started(&place, &TWO);
    let ram = memory();
    let mut iommu = Iommu::connect(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    let mut b = Disk::connect(&place, "b", &ram);
    a.start(a.ring).unwrap();
    assert!(a.works(1, a.page));
    // It never bypasses. The front end is not refused: it would give up the device for good.
    b.starts_away(&place, "07.0/0");

    // Not even if a driver asks for it.
    iommu.start(0);
    assert!(a.works(2, a.page), "the driver has sent nothing");
    assert_eq!(iommu.bypass(1, A), Status::Ok);
    assert_eq!(iommu.bypass(1, B), Status::Unsupp);
    assert!(a.works(3, a.page));
    // The ring that firmware has left is no longer mapped, but its device got no request.
    iommu.attach(3, A);
    iommu.attach(4, B);
    // The worker that serves requests also checks the ring, between two requests.
    for _ in 0..3 {
        iommu.attach(4, B);
    }
    assert!(iommu.is_quiet());
    // One front end at a time.
    drop(b);
    let mut b = Disk::connect(&place, "b", &ram);
    b.starts_away(&place, "07.0/0");
    drop(b);
    let mut b = Disk::connect(&place, "b", &ram);
    b.start_in(&mut iommu, 2, B);
    assert!(b.works(4, b.page), "it is a device like others where its memory is mapped");
    drop(running);
}

#[test]
fn without_bypass_nothing_is_reached_before_there_is_a_driver() {
    // rule V6
    let place = Place::new();
    disks(&place);
    let _running = started(&place, &["--blk", "a=a.img", "--no-bypass"]);
    let ram = memory();
    let mut iommu = Iommu::connect(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    a.starts_away(&place, "06.0/0");
    iommu.start(0);
    drop(a);
    let mut a = Disk::connect(&place, "a", &ram);
    a.starts_away(&place, "06.0/0");
    drop(a);
    let mut a = Disk::connect(&place, "a", &ram);
    a.start_in(&mut iommu, 1, A);
    assert!(a.works(1, a.page));
}

#[test]
fn a_device_whose_addresses_would_not_be_translated_is_refused() {
    let place = Place::new();
    disks(&place);
    let _running = started(&place, &TWO);
    let ram = memory();
    let _iommu = Iommu::connect(&place, &ram);
    assert!(Disk::with(&place, "a", &ram, PLAIN).is_err());
}

#[test]
fn another_guest_is_refused_while_the_first_is_there() {
    let place = Place::new();
    disks(&place);
    let mut running = started(&place, &TWO);
    let (ram, other) = (memory(), memory());
    let mut iommu = Iommu::begin(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    a.start_in(&mut iommu, 1, A);
    assert!(Disk::with(&place, "b", &other, PLAIN | 1 << 33).is_err());
    running.wait_for(|line| line.contains("one guest at a time"));
    assert!(a.works(1, a.page), "the first is not disturbed");
    drop((a, iommu));
    // When all of it is gone, the next guest has its turn.
    let mut served = None;
    wait_until(|| {
        served = Disk::with(&place, "b", &other, PLAIN | 1 << 33).ok();
        served.is_some()
    });
}

#[test]
fn a_ring_that_is_mapped_anew_goes_on() {
    let place = Place::new();
    disks(&place);
    let _running = started(&place, &TWO);
    let ram = memory();
    let mut iommu = Iommu::begin(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    a.start_in(&mut iommu, 1, A);
    assert!(a.works(1, a.page));
    iommu.unmap(1, a.ring, a.ring_bytes);
    iommu.map(1, a.ring, a.ring, a.ring_bytes, MapFlags::READ | MapFlags::WRITE);
    assert!(a.works(2, a.page));
}
