//! Asynchronous I/O that is under way while its memory is taken away. The disk is a pipe: a read
//! is under way for exactly as long as the test writes nothing into it.

use std::{
    fs::File,
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ringfence_devices::disk::{Disk, Image};
use ringfence_drivers::ram::RamPart;
use ringfence_iommu::Prot;
use ringfence_virtq::{blk::Kind, layout::DESC_F_WRITE};

use crate::rig::*;

const DATA: u64 = 0x4000_0000;
const ID_PAGE: u64 = 0x4100_0000;

struct Slow {
    rig: Rig,
    reader: RawQueue,
    other: RawQueue,
    data: RamPart,
    disk: File,
}

/// A device with a read of one page under way on its first queue.
fn slow(workers: usize) -> Slow {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let disk = Disk::File(Arc::new(Image::new(read, 1 << 20)));
    let mut rig = Rig::new(Setup { disk, workers, ..Setup::new(true) });
    let (reader, other) = (rig.queue(0), rig.queue(1));
    let (data, id) = (rig.pages(1), rig.pages(1));
    rig.map(DATA, data.gpa(), PAGE as u64, Prot::RW);
    rig.map(ID_PAGE, id.gpa(), PAGE as u64, Prot::RW);
    let mut slow = Slow { rig, reader, other, data, disk: write.into() };
    slow.begin();
    slow
}

impl Slow {
    fn begin(&mut self) {
        self.reader.submit(Kind::In, 0, &[piece(DATA, PAGE)]);
        let rig = &self.rig;
        until("a request under way", || rig.on_unit(0, |unit| unit.under_way(0)) == 1);
    }

    fn go_round(&mut self) {
        self.other.go_round_with(piece(ID_PAGE, 20));
    }

    /// Completes the read.
    fn complete(&mut self, byte: u8) {
        self.disk.write_all(&[byte; PAGE]).unwrap();
    }

    /// Unmaps the data while the read is under way, and checks that this does not end before the
    /// read does.
    fn unmap_waits(&mut self, byte: u8) {
        let unmapped = AtomicBool::new(false);
        let (domain, data) = (Arc::clone(&self.rig.domain), self.data.window().clone());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                unmap(&domain, DATA, PAGE as u64);
                // At this moment the page is the driver's again, with what the disk gave in it.
                assert!(holds(&data, byte), "the unmap was completed before the read was done");
                unmapped.store(true, Ordering::Release);
            });
            for _ in 0..20 {
                self.go_round();
                assert!(!unmapped.load(Ordering::Acquire), "unmapped under a read");
            }
            self.complete(byte);
        });
        assert!(unmapped.load(Ordering::Acquire));
    }
}

#[test]
fn an_unmap_is_completed_only_when_the_io_that_uses_the_range_has_ended() {
    // rule D15
    for workers in [1, 2] {
        let mut slow = slow(workers);
        for byte in 1..4 {
            slow.unmap_waits(byte);
            assert_eq!(slow.reader.finish(), OK);
            // Nothing of the old mapping is left.
            assert_eq!(slow.reader.read(0, piece(DATA, PAGE)), IOERR);
            let gpa = slow.data.gpa();
            slow.rig.map(DATA, gpa, PAGE as u64, Prot::RW);
            slow.begin();
        }
        slow.complete(9);
        assert_eq!(slow.reader.finish(), OK);
    }
}

#[test]
fn unmaps_of_other_ranges_do_not_wait_for_io_under_way() {
    let mut slow = slow(1);
    for n in 0..100 {
        let iova = 0x5000_0000 + n * PAGE as u64;
        slow.rig.map(iova, GPA, PAGE as u64, Prot::RW);
        slow.rig.unmap(iova, PAGE as u64);
    }
    slow.complete(1);
    assert_eq!(slow.reader.finish(), OK);
}

#[test]
fn io_of_a_queue_that_has_failed_does_not_hold_up_unmaps_for_ever() {
    let mut slow = slow(1);
    slow.reader.push(SIZE);
    assert!(wait_for(&slow.reader.err, LONG));
    slow.unmap_waits(5);
    slow.rig.iommu_works();
    slow.go_round();
}

#[test]
fn io_of_a_queue_that_is_disabled_ends_and_is_completed_when_it_is_enabled() {
    let mut slow = slow(1);
    slow.rig.blk.set_vring_enable(0, false).unwrap();
    let used = slow.reader.used_index();
    slow.unmap_waits(6);
    slow.go_round();
    assert_eq!(slow.reader.used_index(), used, "completions in a disabled ring");
    slow.rig.blk.set_vring_enable(0, true).unwrap();
    assert_eq!(slow.reader.finish(), OK);
}

#[test]
fn io_of_a_ring_that_is_away_ends_and_is_completed_when_the_ring_is_back() {
    let mut slow = slow(1);
    let page = slow.reader.page.clone();
    let gpa = GPA + (page.slice().as_ptr() as u64 - slow.rig.ram.user_addr());
    slow.rig.unmap(slow.reader.bus, PAGE as u64);
    let used = slow.reader.used_index();
    slow.unmap_waits(7);
    slow.go_round();
    assert_eq!(slow.reader.used_index(), used);
    slow.rig.map(slow.reader.bus, gpa, PAGE as u64, Prot::RW);
    assert_eq!(slow.reader.finish(), OK);
}

#[test]
fn a_detach_waits_for_io_under_way() {
    let mut slow = slow(2);
    let detached = AtomicBool::new(false);
    let (domain, data) = (Arc::clone(&slow.rig.domain), slow.data.window().clone());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            domain.detach(ENDPOINT).unwrap();
            assert!(holds(&data, 8));
            detached.store(true, Ordering::Release);
        });
        for _ in 0..20 {
            slow.rig.round(0);
            assert!(!detached.load(Ordering::Acquire));
        }
        slow.complete(8);
    });
    domain.attach(ENDPOINT).unwrap();
    assert_eq!(slow.reader.finish(), OK);
}

#[test]
fn io_under_way_survives_a_new_memory_table() {
    let mut slow = slow(1);
    for byte in 1..10 {
        // The same memory, mapped anew: the kernel still has the old address.
        slow.rig.share(&[]);
        slow.go_round();
        slow.complete(byte);
        assert_eq!(slow.reader.finish(), OK);
        assert!(holds(slow.data.window(), byte));
        slow.begin();
    }
    slow.complete(77);
    assert_eq!(slow.reader.finish(), OK);
    assert_eq!(unmapped_by(&slow.rig.workers), 0);
}

#[test]
fn a_ring_that_stops_completes_what_is_under_way() {
    let mut slow = slow(1);
    // The data is in the pipe, but the completion not yet in the ring: the stop has to wait for it.
    slow.rig.blk.set_vring_enable(0, false).unwrap();
    slow.complete(3);
    let next = slow.rig.blk.get_vring_base(0).unwrap();
    assert_eq!(next, 1);
    assert_eq!(slow.reader.finish(), OK);
    assert!(holds(slow.data.window(), 3));
}

#[test]
fn many_requests_to_a_file_race_with_unmaps_of_their_memory() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let mut full = file.try_clone().unwrap();
    full.write_all(&vec![0xc3; 1 << 20]).unwrap();
    let disk = Disk::File(Arc::new(Image::new(file.into(), 1 << 20)));
    let mut rig = Rig::new(Setup { disk, workers: 2, ..Setup::new(true) });
    let mut queue = rig.queue(1);
    let data = rig.pages(64);
    let len = 64 * PAGE;
    for round in 0..100 {
        rig.map(DATA, data.gpa(), len as u64, Prot::WRITE);
        queue.submit(Kind::In, 0, &[piece(DATA, len)]);
        for _ in 0..round % 20 {
            std::thread::yield_now();
        }
        rig.unmap(DATA, len as u64);
        // Clears what arrived before the unmap was completed; nothing may arrive after.
        fill(data.window(), 0);
        let status = queue.finish();
        assert!(status == OK || status == IOERR);
        assert!(holds(data.window(), 0), "round {round}: written after the unmap was completed");
    }
}

#[test]
fn a_status_that_cannot_be_written_when_io_ends_is_shown_by_the_length() {
    let mut slow = slow(1);
    slow.complete(1);
    assert_eq!(slow.reader.finish(), OK);
    let page = slow.rig.pages(1);
    slow.rig.map(0x4200_0000, page.gpa(), PAGE as u64, Prot::RW);
    slow.reader.lay(Kind::In, 0, &[piece(DATA, PAGE)]);
    slow.reader.desc(2, 0x4200_0000, 1, DESC_F_WRITE, 0);
    slow.reader.push(0);
    let rig = &slow.rig;
    until("a request under way", || rig.on_unit(0, |unit| unit.under_way(0)) == 1);
    // The status is not part of what the kernel uses: its page can go at any time.
    rig.unmap(0x4200_0000, PAGE as u64);
    slow.complete(2);
    assert_eq!(slow.reader.wait(), (0, 0));
    assert!(holds(slow.data.window(), 2) && holds(page.window(), 0));
}
