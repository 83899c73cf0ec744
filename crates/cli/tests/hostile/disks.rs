//! Disks that hang: files of a file system that responds when the test wants it to. Mounting one
//! takes root.

use std::{
    fs::{self, File},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::{
    common::{LIMIT, Place},
    fuse::{self, Fault, Fuse},
    guest::{BASE, Desc, LOG_ALL, RING, SIZE, Session, WRITE},
    honest::{Device, DiskDriver},
    idle::takes_no_time,
    iommu::{attach, map, request, status, submit, unmap},
    service::Service,
    wire::{in_flight, request::*, state, words},
    writer::{ERROR, FLUSH, Kind, LONGEST, OK, Request, SECTOR, Writer},
};

/// Request types of a disk, by their numbers.
const KINDS: [(&str, u32); 3] = [("a read", 0), ("a write", 1), ("a flush", 4)];
/// Sectors that no next front end uses, far enough apart to stay clear of read-ahead.
const FAR: u64 = 2048;

fn hanging(device: Device) -> (Service, Fuse) {
    hanging_with(device, "")
}

/// With options of `guard`'s disk.
fn hanging_with(device: Device, options: &str) -> (Service, Fuse) {
    let place = Place::new();
    let fuse = Fuse::mount(&place.path("fuse"), 64 << 20);
    (Service::with(place, device, &format!("fuse/image{options}")), fuse)
}

/// The image is locked only while a driver uses it.
fn handing_over(more: &[&str]) -> (Service, Fuse) {
    let place = Place::new();
    let fuse = Fuse::mount(&place.path("fuse"), 64 << 20);
    let more = [&["--share-image"], more].concat();
    (Service::with_more(place, Device::Disk, "fuse/image", &more), fuse)
}

fn lock(image: &File) -> Result<(), Errno> {
    flock(image, FlockOperation::NonBlockingLockExclusive)
}

/// A driver with a request that the disk holds.
fn stuck(service: &Service, fuse: &Fuse, device: Device, kind: u32, number: u64) -> DiskDriver {
    let mut driver = DiskDriver::start(BASE, &service.path("hostile"), device);
    if kind == 4 {
        // There must be something to flush.
        driver.submit(1, FAR);
        assert_eq!(driver.finish(), 0);
    }
    fuse.hold(true);
    driver.submit(kind, if kind == 4 { 0 } else { FAR * (number + 2) });
    fuse.await_held(1);
    driver
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_disk_that_hangs_delays_no_other() {
    // rule D28
    for device in [Device::Disk, Device::Guarded] {
        let (mut service, fuse) = hanging(device);
        for (number, (name, kind)) in KINDS.into_iter().enumerate() {
            for stops in [false, true] {
                let number = 2 * number as u64 + u64::from(stops);
                service.attack(name, |_| {});
                let driver = stuck(&service, &fuse, device, kind, number);
                service.neighbour_goes_on(name);
                if stops {
                    driver.session.client.send(GET_VRING_BASE, &state(0, 0), &[]);
                    service.neighbour_goes_on(name);
                }
                drop(driver);
                service.neighbour_goes_on(name);
                // The next one is there at once; its rings start once no old write can come after a
                // new one.
                let next = service.target().open(0);
                let _ring = next.ring(0);
                service.neighbour_goes_on(name);
                drop(next);
                fuse.hold(false);
                service.attack(name, |_| {});
            }
        }
        service.end();
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_service_whose_disk_hangs_ends_all_the_same() {
    for (name, kind) in KINDS {
        let (mut service, fuse) = hanging(Device::Guarded);
        let _driver = stuck(&service, &fuse, Device::Guarded, kind, 0);
        service.terminate();
        let begun = Instant::now();
        service.ends_or_names("fuse/image");
        // A process that has ended has no command line, whatever the kernel still holds of it.
        let line = format!("/proc/{}/cmdline", service.process().id);
        while fs::read(&line).is_ok_and(|line| !line.is_empty()) {
            assert!(begun.elapsed() < LIMIT, "{name}: it waits for the disk");
            std::thread::sleep(Duration::from_millis(1));
        }
        fuse.hold(false);
        // Not in order: the request that the kernel holds was not completed.
        let log = service.ended_with(1);
        assert!(!log.contains("giving up"), "{name}: it waited for the disk: {log}");
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn an_image_that_cannot_be_handed_over_delays_no_other() {
    for ends in [false, true] {
        let (mut service, fuse) = handing_over(&[]);
        let mut driver = DiskDriver::start(BASE, &service.path("hostile"), Device::Disk);
        driver.writes_and_reads(FAR, 1);
        fuse.hold(true);
        // The reply comes once the written data is on the disk.
        driver.session.client.send(GET_VRING_BASE, &state(0, 0), &[]);
        fuse.await_held(1);
        drop(driver);
        let next = service.target().open(0);
        let _ring = next.ring(0);
        if ends {
            service.terminate();
            service.ends_or_names("fuse/image");
            fuse.hold(false);
            service.ended_with(1);
        } else {
            drop(next);
            fuse.hold(false);
            service.attack("a disk that did not flush", |_| {});
            service.end();
        }
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn an_image_is_handed_over_once_its_disk_completes() {
    // While such a write is under way Linux flushes the file all the same: the flush does not wait in its place.
    let (service, fuse) = handing_over(&["--direct"]);
    let other = fuse.open();
    let mut writer = Writer::start(Session::open_at(BASE, &service.path("hostile"), 0));
    let at = FAR as usize * SECTOR;
    fuse.hold_bytes(at..at + LONGEST as usize * SECTOR);
    writer.submit(Request { kind: Kind::Write, sector: FAR, count: LONGEST, number: 1 });
    fuse.await_held(1);
    drop(writer);
    // For as long as the last driver's write could still change it.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(lock(&other), Err(Errno::AGAIN), "the disk has a write still");
    fuse.hold(false);
    let begun = Instant::now();
    while lock(&other).is_err() {
        assert!(begun.elapsed() < LIMIT, "the image stays locked");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(other);
    service.end();
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn an_image_that_has_lost_writes_is_not_handed_over() {
    // The kernel reports the error once: to the driver's flush, or to the release of the image.
    for to_driver in [true, false] {
        let (service, fuse) = handing_over(&[]);
        let session = Session::open_at(BASE, &service.path("hostile"), FLUSH);
        let mut driver = Writer::start(session);
        assert_eq!(driver.one(Kind::Write, FAR, LONGEST, 1), OK);
        fuse.fault(fuse::Kind::Flush, Fault::Fails(Errno::IO));
        if to_driver {
            assert_eq!(driver.one(Kind::Flush, 0, 0, 0), ERROR);
        }
        assert!(driver.session.stop(0).is_some());
        drop(driver);
        assert_eq!(fuse.heal(), 0);
        // The next front end comes after all that the last one left.
        drop(service.target().open(0));
        let other = fuse.open();
        assert_eq!(lock(&other), Err(Errno::AGAIN), "the image was let go of");
        drop(other);
        service.end();
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_ring_that_waits_for_an_older_write_takes_no_processor_time() {
    for device in [Device::Disk, Device::Guarded] {
        let (mut service, fuse) = hanging(device);
        service.drop_neighbour();
        drop(stuck(&service, &fuse, device, 1, 0));
        let mut next = DiskDriver::start(BASE, &service.path("hostile"), device);
        next.submit(0, 0);
        takes_no_time(&service, "an older write");
        assert!(next.ring.take(&next.session.ram).is_none(), "the disk has an older write");
        fuse.hold(false);
        assert_eq!(next.finish(), 0);
        drop(next);
        service.end();
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn an_unmap_that_waits_for_a_disk_takes_no_processor_time() {
    // rule D15
    const DOMAIN: u32 = 1;
    const ENDPOINT: u32 = 0x30;
    let (mut service, fuse) = hanging_with(Device::Guarded, ",disk-buffers=guest");
    let session = service.take_iommu();
    let mut ring = session.ring(0);
    let last = BASE + SIZE - 1;
    assert_eq!(request(&session, &mut ring, &attach(1, DOMAIN, ENDPOINT, 0), 4), 0);
    assert_eq!(request(&session, &mut ring, &map(DOMAIN, BASE, last, BASE, 3), 4), 0);
    let driver = stuck(&service, &fuse, Device::Guarded, 0, 0);
    submit(&session, &mut ring, &unmap(DOMAIN, BASE, last), 4);
    takes_no_time(&service, "an UNMAP");
    assert!(ring.take(&session.ram).is_none(), "the disk has the memory still");
    fuse.hold(false);
    ring.wait(&session.ram);
    assert_eq!(status(&session), 0);
    drop((driver, session));
    service.end();
}

/// Something that the device reads or writes, in a file whose pages do not come.
type Share = fn(&Session, &File);

const SHARES: [(&str, Share); 4] = [
    ("memory", |session, file| {
        session.client.set(SET_MEM_TABLE, &session.ram.table(), &[file.as_fd()]);
    }),
    ("a further region", |session, file| {
        let at = session.ram.data() << 4;
        session.client.set(ADD_MEM_REG, &words(&[0, at, SIZE, at, 0]), &[file.as_fd()]);
    }),
    ("a log", |session, file| {
        session.client.set(SET_LOG_BASE, &words(&[SIZE, 0]), &[file.as_fd()]);
    }),
    ("a record of what is in flight", |session, file| {
        let payload = in_flight(SIZE, 0, 1, RING);
        session.client.set(SET_INFLIGHT_FD, &payload, &[file.as_fd()]);
    }),
];

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_file_whose_pages_do_not_come_delays_no_other() {
    for device in [Device::Disk, Device::Guarded, Device::Net] {
        let mut service = Service::start(device);
        let target = service.target();
        let fuse = Fuse::mount(&target.folder.join("foreign"), SIZE as usize);
        fuse.hold(true);
        for (name, share) in SHARES {
            let file = fuse.open();
            let session = target.open(LOG_ALL);
            share(&session, &file);
            let mut ring = session.ring(0);
            let at = session.ram.data() << 4;
            for (slot, addr) in [(0, session.ram.data()), (1, at)] {
                ring.place(&session.ram, slot, &[Desc(addr, 16, WRITE, 0)]);
                ring.offer(&session.ram, slot);
            }
            service.neighbour_goes_on(name);
            drop(session);
            drop(file);
            // While no page comes, and what was shared cannot be closed.
            service.still_serves(name);
        }
        fuse.hold(false);
        service.attack("files that no longer hang", |_| {});
        drop(fuse);
        service.end();
    }
}
