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
    writer::{ERROR, FLUSH, Kind, LONGEST, OK, Request, SECTOR, SLOTS, UNSUPPORTED, Writer, word},
};

/// A sector far from others: nothing that is read ahead reaches it.
const FAR: u64 = 16384;
/// How often a read goes wrong: Linux may read again what it has not read ahead.
const TIMES: usize = 8;
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
            for (ring, at) in rings.iter_mut().zip([512, 1024]) {
                // While a write is under way Linux begins no other to the same file of FUSE, and flushes nothing.
                let number = 7;
                if kind == Kind::Read {
                    assert_eq!(ring.one(Kind::Write, at, LONGEST, number), OK);
                    assert_eq!(ring.one(Kind::Flush, 0, 0, 0), OK);
                }
                assert_eq!(ring.one(Kind::Read, at, LONGEST, 0), OK);
                let there = if kind == Kind::Read { words(at, number) } else { vec![0; 8] };
                assert_eq!(ring.words, there, "{way}");
            }
            service.neighbour_goes_on(way);
            fuse.hold(false);
            assert_eq!(rings[0].wait(), (hung, OK), "{way}");
            drop((rings, session));
            service.end();
        }
    }
}

/// Linux has a limited number of threads for the requests of one thread that may have to wait (io_uring): at most 4
/// for each processor. A disk that hangs with as many leaves those of others alone.
#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn requests_that_hang_leave_other_disks_the_threads_of_linux() {
    let (service, fuse) = disk(WAYS[0]);
    let session = session(&service, FLUSH);
    let mut rings = [0, 1].map(|index| Writer::of(&session, index));
    fuse.hold(true);
    for (number, ring) in (0..2 * SLOTS as u64).map(|n| (n, n as usize % 2)) {
        let sector = FAR + 1024 * number;
        rings[ring].submit(Request { kind: Kind::Read, sector, count: LONGEST, number });
    }
    let threads = 4 * std::thread::available_parallelism().unwrap().get();
    fuse.await_held(threads.min(2 * SLOTS));
    service.neighbour_goes_on("requests that hang");
    fuse.hold(false);
    for ring in &mut rings {
        (0..SLOTS).for_each(|_| assert_eq!(ring.wait().1, OK));
    }
    drop((rings, session));
    service.end();
}

/// Virtio 1.2, 5.2.6: a request that meets an error of the device ends with IOERR; what it leaves of its own sectors is
/// open until they are written again.
#[test]
#[ignore = "mounts a file system of FUSE, which takes root"]
fn an_error_of_the_disk_is_one_of_the_request_and_of_no_other() {
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

/// Virtio 1.2, 5.2.6: UNSUPP is the status of a request that the device does not support, as EOPNOTSUPP is fallocate(2)'s
/// of a file that has no such ranges, and nothing was done then: a device of blocks may turn out to know no request for
/// zeroes, and its driver writes them itself. All other errors are IOERR.
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
            assert!(status == ERROR || there(&fuse, FAR) == words(FAR, 1), "{way}");
        }
        assert_eq!(writer.one(Kind::Zero, FAR, LONGEST, 0), OK, "{way}");
        assert_eq!(there(&fuse, FAR), vec![0; LONGEST as usize], "{way}");
        drop((writer, session));
        service.end();
    }
}

/// POSIX: a read or write that moves less than it was to is no error, and the rest can be asked for; a read that moves
/// nothing has met the end of the file. Virtio 1.2, 5.2.6: OK says that all was moved.
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
            if way == ",direct" && status == ERROR {
                // Past its cache Linux may say EIO of what FUSE wrote in part, and not how much that was.
                assert_eq!(writer.one(Kind::Write, sector, LONGEST, number), OK, "{way}");
            } else {
                assert_eq!(status, OK, "{way}");
            }
            assert_eq!(there(&fuse, sector), words(sector, number), "{way}");
        }
        // To Linux's cache a short reply of FUSE is the end of the file, which stays as short.
        let sector = FAR + 8192;
        let word_bytes = |word: &u64| word.to_le_bytes().repeat(SECTOR / 8);
        let data: Vec<u8> = words(sector, 4).iter().flat_map(word_bytes).collect();
        fuse.put(bytes(sector).start, &data);
        (0..TIMES).for_each(|_| fuse.fault(fuse::Kind::Read, Fault::Short(SECTOR)));
        let status = writer.one(Kind::Read, sector, LONGEST, 0);
        assert!(fuse.heal() < TIMES, "{way}: nothing was short");
        assert!(status == ERROR || writer.words == words(sector, 4), "{way}: {:x?}", writer.words);
        service.neighbour_goes_on(way);
        drop((writer, session));
        service.end();
    }
}

/// What is not read or written ends with IOERR (virtio 1.2, 5.2.6), and so does a flush, which would say that completed
/// writes are stable: that is unknown from then on.
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
