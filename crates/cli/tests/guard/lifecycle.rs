//! Front ends and guests that come and go, and the end of the service.

use ringfence_virtio_iommu::wire::{Request, Status};
use rustix::process::Signal;

use crate::{
    common::Place,
    rig::{Disk, Iommu, figure, figures, memory, started, wait_until},
};

const ONE: [&str; 2] = ["--blk", "a=a.img"];
const A: u32 = 0x30;

fn place() -> Place {
    let place = Place::new();
    place.write("a.img", vec![0xaa; 1 << 16]);
    place
}

#[test]
fn nothing_is_reached_without_a_front_end_of_the_iommu() {
    let place = place();
    let mut running = started(&place, &ONE);
    let ram = memory();
    let mut early = Disk::connect(&place, "a", &ram);
    // No driver has allowed it to bypass yet.
    early.starts_away(&place, "06.0/0");
    drop(early);

    let mut iommu = Iommu::begin(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    a.start_in(&mut iommu, 1, A);
    assert!(a.works(1, a.page));
    drop(iommu);
    running.wait_for(|line| line.contains("the devices behind it reach nothing now"));
    let mut served = false;
    std::thread::scope(|scope| {
        let request = scope.spawn(|| a.does(ringfence_virtq::blk::Kind::In, 0, a.page));
        wait_until(|| {
            // The ring is unmapped too, so that the request cannot complete until the next driver
            // maps it.
            served = request.is_finished();
            served || figure(&figures(&place), "ring_away_total{queue=\"06.0/0\"}") > 0
        });
        assert!(!served, "it has completed");
        let mut iommu = Iommu::begin(&place, &ram);
        assert_eq!(iommu.request(Request::Detach { domain: 1, endpoint: A }), Status::Inval);
        // No driver has disallowed bypass, so the device resumes.
        assert!(request.join().unwrap());
    });
}

#[test]
fn the_table_takes_the_place_of_a_link_and_leaves_what_that_names() {
    let place = place();
    for (target, contents) in [("kept", Some("kept")), ("nowhere", None)] {
        if let Some(contents) = contents {
            place.write(target, contents);
        }
        let _ = std::fs::remove_file(place.path("i.viot"));
        std::os::unix::fs::symlink(place.path(target), place.path("i.viot")).unwrap();
        let running = started(&place, &ONE);
        running.signal(Signal::TERM);
        assert_eq!(running.wait().code(), 0);
        assert_eq!(std::fs::read_to_string(place.path(target)).ok().as_deref(), contents);
        assert!(std::fs::symlink_metadata(place.path("i.viot")).unwrap().is_file());
        assert!(std::fs::read(place.path("i.viot")).unwrap().starts_with(b"VIOT"));
    }
    assert_eq!(place.names(), ["a.img", "i.viot", "kept"]);
}

#[test]
fn a_paused_guest_goes_on_with_what_it_had_mapped() {
    let place = place();
    let _running = started(&place, &ONE);
    let ram = memory();
    let mut iommu = Iommu::begin(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    a.start_in(&mut iommu, 1, A);
    a.stop();
    let next = iommu.stop();
    assert_eq!(next, 3);
    iommu.start(next);
    a.start(a.ring).unwrap();
    assert!(a.works(1, a.page));
    assert_eq!(iommu.request(Request::Detach { domain: 1, endpoint: A }), Status::Ok);
}

#[test]
fn a_guest_that_is_reset_begins_with_its_firmware() {
    // rule V3, rule V4
    let place = place();
    let mut running = started(&place, &ONE);
    let ram = memory();
    let mut iommu = Iommu::begin(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    a.start_in(&mut iommu, 1, A);
    iommu.main.set_config(36, &[0]).unwrap();
    a.stop();
    iommu.stop();
    // Nothing of it is mapped any more, but firmware may use the disk.
    drop(a);
    let mut b = Disk::connect(&place, "a", &ram);
    b.start(b.ring).unwrap();
    running.wait_for(|line| line.contains("the guest was reset"));
    assert!(b.works(2, b.page));
    iommu.start(0);
    let mut config = [0];
    iommu.main.config(36, &mut config).unwrap();
    assert_eq!(config, [1], "as at the beginning");
    assert_eq!(iommu.request(Request::Detach { domain: 1, endpoint: A }), Status::Inval);
    b.stop();
    b.start_in(&mut iommu, 1, A);
    assert!(b.works(3, b.page));
}

#[test]
fn a_driver_that_resets_the_device_finds_nothing_attached() {
    // rule V4
    let place = place();
    let _running = started(&place, &ONE);
    let ram = memory();
    let mut iommu = Iommu::begin(&place, &ram);
    for round in 0..3 {
        iommu.attach(1, A);
        iommu.stop();
        if round == 1 {
            iommu.main.reset_device().unwrap();
            drop(iommu);
            iommu = Iommu::connect(&place, &ram);
        }
        iommu.start(0);
        assert_eq!(iommu.request(Request::Detach { domain: 1, endpoint: A }), Status::Inval);
    }
}

#[test]
fn it_ends_in_order_while_it_is_used() {
    let place = place();
    let running = started(&place, &ONE);
    let ram = memory();
    let mut iommu = Iommu::begin(&place, &ram);
    let mut a = Disk::connect(&place, "a", &ram);
    a.start_in(&mut iommu, 1, A);
    assert!(a.works(1, a.page));
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(!ended.err.contains("panicked"), "{ended}");
    assert_eq!(place.names(), ["a.img", "i.viot"]);
}
