//! A disk that goes wrong, a file of FUSE: it leaves requests hanging, reports errors, moves less than was
//! asked for, and disappears. A driver gets an error or what it asked for, never other bytes.

use std::rc::Rc;

use rustix::io::Errno;

use crate::{
    common::Place,
    fuse::{self, Fault, Fuse},
    guest::{BASE, PLATFORM, Session},
    honest::Device,
    service::Service,
    writer::{ERROR, FLUSH, Kind, LONGEST, OK, Request, SECTOR, UNSUPPORTED, Writer, word},
};

/// A sector far from others: nothing that is read ahead reaches it.
const FAR: u64 = 16384;
/// How the disk is used: options of `guard`.
const WAYS: [&str; 3] = [",disk-buffers=own", ",disk-buffers=guest", ",direct"];

/// A disk of FUSE in a service, beside another disk.
fn disk(way: &str) -> (Service, Fuse) {
    let place = Place::new();
    let fuse = Fuse::mount(&place.path("fuse"), 32 << 20);
    (Service::with(place, Device::Guarded, &format!("fuse/image{way}")), fuse)
}

fn session(service: &Service, features: u64) -> Rc<Session> {
    Rc::new(Session::open_at(BASE, &service.path("hostile"), PLATFORM | features))
}

fn words(sector: u64, number: u64) -> Vec<u64> {
    (sector..sector + LONGEST).map(|sector| word(sector, number)).collect()
}

fn bytes(sector: u64) -> std::ops::Range<usize> {
    sector as usize * SECTOR..(sector + LONGEST) as usize * SECTOR
}

/// What the disk has.
fn there(fuse: &Fuse, sector: u64) -> Vec<u64> {
    fuse.bytes(bytes(sector)).chunks(SECTOR).map(crate::writer::word_of).collect()
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_request_that_hangs_holds_up_no_other_of_its_disk() {
    for way in WAYS {
        for kind in [Kind::Read, Kind::Write] {
            let (service, fuse) = disk(way);
            let session = session(&service, FLUSH);
            let mut rings = [0, 1].map(|index| Writer::of(&session, index));
            fuse.hold_bytes(bytes(FAR));
            let hung = Request { kind, sector: FAR, count: LONGEST, number: 1 };
            rings[0].submit(hung);
            fuse.await_held(1);
            for (ring, at) in rings.iter_mut().zip([0, 256]) {
                // While a write is under way Linux begins no other to the same file of FUSE, and flushes nothing.
                let number = 7;
                if kind == Kind::Read {
                    assert_eq!(ring.one(Kind::Write, at, LONGEST, number), OK);
                    assert_eq!(ring.one(Kind::Flush, 0, 0, 0), OK);
                }
                assert_eq!(ring.one(Kind::Read, at, LONGEST, 0), OK);
                assert!(kind == Kind::Write || ring.words == words(at, number));
            }
            service.neighbour_goes_on(way);
            fuse.hold(false);
            assert_eq!(rings[0].wait(), (hung, OK), "{way}");
            drop((rings, session));
            service.end();
        }
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn an_error_of_the_disk_is_one_of_the_request_and_of_no_other() {
    // Linux may read again what it has not read ahead.
    const TIMES: usize = 8;
    for way in WAYS {
        let (mut service, fuse) = disk(way);
        for (of_disk, kind) in [(fuse::Kind::Read, Kind::Read), (fuse::Kind::Write, Kind::Write)] {
            for (errno, sector) in [(Errno::IO, FAR), (Errno::NOSPC, FAR + 1024)] {
                let name = format!("{way}, {kind:?}, {errno:?}");
                let session = session(&service, FLUSH);
                let mut writer = Writer::of(&session, 0);
                (0..TIMES).for_each(|_| fuse.fault(of_disk, Fault::Fails(errno)));
                assert_eq!(writer.one(kind, sector, LONGEST, 2), ERROR, "{name}");
                assert!(fuse.heal() < TIMES, "{name}: nothing went wrong");
                assert_eq!(writer.one(Kind::Write, sector, LONGEST, 3), OK, "{name}");
                assert_eq!(writer.one(kind, sector, LONGEST, 3), OK, "{name}");
                assert_eq!(writer.one(Kind::Read, sector, LONGEST, 0), OK, "{name}");
                assert_eq!(writer.words, words(sector, 3), "{name}");
                assert_eq!(there(&fuse, sector), words(sector, 3), "{name}");
            }
        }
        service.attack("a disk with errors", |_| {});
        service.end();
    }
}

/// Linux reports only once that what was written did not reach the disk, and takes it for written from then on
/// (fsync(2)). A flush that succeeds later would say that all writes completed before it are stable (virtio 1.2,
/// 5.2.6.2), and they are not.
#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn once_a_flush_has_failed_none_succeeds() {
    for way in WAYS {
        // A driver that knows no flushes: each of its writes is to be stable when it completes.
        for (features, kind) in [(FLUSH, Kind::Flush), (0, Kind::Write)] {
            let (service, fuse) = disk(way);
            let first = session(&service, features);
            let mut rings = [0, 1].map(|index| Writer::of(&first, index));
            assert_eq!(rings[1].one(Kind::Write, FAR, LONGEST, 1), OK, "{way}");
            fuse.fault(fuse::Kind::Flush, Fault::Fails(Errno::IO));
            assert_eq!(rings[0].one(kind, FAR + 1024, LONGEST, 2), ERROR, "{way}");
            assert_eq!(fuse.heal(), 0, "{way}: nothing went wrong");
            let fails = |writer: &mut Writer| {
                assert_eq!(writer.one(kind, FAR + 1024, LONGEST, 3), ERROR, "{way}");
                assert_eq!(writer.one(Kind::Read, FAR, LONGEST, 0), OK, "{way}");
                assert_eq!(writer.words, words(FAR, 1), "{way}");
            };
            rings.iter_mut().for_each(fails);
            drop((rings, first));
            fails(&mut Writer::of(&session(&service, features), 0));
            service.neighbour_goes_on(way);
            service.end();
        }
    }
}

/// A device of blocks may turn out to know no request for zeroes. Its driver writes them then.
#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_disk_that_zeroes_no_range_after_all_says_that_it_is_not_supported() {
    for way in WAYS {
        let (service, fuse) = disk(way);
        let session = session(&service, FLUSH);
        let mut writer = Writer::of(&session, 0);
        assert_eq!(writer.one(Kind::Write, FAR, LONGEST, 1), OK, "{way}");
        for (errno, status) in [(Errno::OPNOTSUPP, UNSUPPORTED), (Errno::IO, ERROR)] {
            fuse.fault(fuse::Kind::Zero, Fault::Fails(errno));
            assert_eq!(writer.one(Kind::Zero, FAR, LONGEST, 0), status, "{way}");
            assert_eq!(fuse.heal(), 0, "{way}: nothing went wrong");
            assert_eq!(there(&fuse, FAR), words(FAR, 1), "{way}");
        }
        assert_eq!(writer.one(Kind::Zero, FAR, LONGEST, 0), OK, "{way}");
        assert_eq!(there(&fuse, FAR), vec![0; LONGEST as usize], "{way}");
        drop((writer, session));
        service.end();
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn what_the_disk_moves_in_part_is_moved_whole_or_is_an_error() {
    for way in WAYS {
        let (service, fuse) = disk(way);
        let session = session(&service, FLUSH);
        let mut writer = Writer::of(&session, 0);
        for (number, short) in [(1, SECTOR), (2, 3 * SECTOR), (3, 7 * SECTOR)] {
            let sector = FAR + 1024 * number;
            fuse.fault(fuse::Kind::Write, Fault::Short(short));
            let status = writer.one(Kind::Write, sector, LONGEST, number);
            assert_eq!(fuse.heal(), 0, "{way}");
            if way == ",direct" {
                // Linux makes an error of it.
                assert_eq!(status, ERROR);
                assert_eq!(writer.one(Kind::Write, sector, LONGEST, number), OK);
            }
            assert!(status == OK || way == ",direct", "{way}");
            assert_eq!(there(&fuse, sector), words(sector, number), "{way}");
        }
        if way == ",direct" {
            // Linux itself decides what becomes of less in its page cache.
            assert_eq!(writer.one(Kind::Write, FAR, LONGEST, 4), OK);
            fuse.fault(fuse::Kind::Read, Fault::Short(SECTOR));
            let status = writer.one(Kind::Read, FAR, LONGEST, 0);
            assert_eq!(fuse.heal(), 0, "{way}");
            assert!(status == ERROR || writer.words == words(FAR, 4), "{:x?}", writer.words);
        }
        service.neighbour_goes_on(way);
        drop((writer, session));
        service.end();
    }
}

#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn a_disk_that_disappears_fails_its_requests_and_ends_no_service() {
    for way in WAYS {
        let (service, fuse) = disk(way);
        let connect = || Writer::of(&session(&service, FLUSH), 0);
        let mut writer = connect();
        assert_eq!(writer.one(Kind::Write, 0, LONGEST, 1), OK);
        fuse.hold_bytes(bytes(FAR));
        writer.submit(Request { kind: Kind::Read, sector: FAR, count: LONGEST, number: 0 });
        fuse.await_held(1);
        fuse.disappear();
        assert_eq!(writer.wait().1, ERROR, "{way}");
        for connection in 0..2 {
            for kind in [Kind::Read, Kind::Write, Kind::Flush] {
                let sector = FAR + 1024 * (connection + 1);
                assert_eq!(writer.one(kind, sector, LONGEST, 2), ERROR, "{way}, {kind:?}");
            }
            service.neighbour_goes_on(way);
            // The next front end's requests fail, too.
            drop(writer);
            writer = connect();
        }
        drop(writer);
        service.end();
    }
}
