//! Memory in a file that is truncated under the device.

use std::os::fd::{AsFd, OwnedFd};

use ringfence_mem::{Access, Memory, Physical, Region, Translate, Window, sigbus};
use ringfence_vhost_user::ProtocolFeatures;
use ringfence_virtq::{F_VERSION_1, blk::Kind};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::rig::*;

const OTHER_GPA: u64 = 0x8_0000_0000;
const OTHER_USER: u64 = 0x7000_0000_0000;
const LEN: u64 = 16 * PAGE as u64;

struct Unsealed {
    file: OwnedFd,
    region: Region,
    /// The driver's own view.
    window: Window,
}

fn unsealed() -> Unsealed {
    sigbus::install().unwrap();
    let file = memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, LEN).unwrap();
    let region = Region { gpa: OTHER_GPA, size: LEN, user_addr: OTHER_USER, mmap_offset: 0 };
    let memory = Memory::map(vec![(region, file.try_clone().unwrap())]).unwrap();
    let window = Physical::new(memory).window(OTHER_GPA, LEN, Access::ReadWrite).unwrap();
    Unsealed { file, region, window }
}

#[test]
fn a_truncated_buffer_stops_the_queue_that_meets_it_and_the_process_lives() {
    for translated in [false, true] {
        let mut neighbour = Rig::new(Setup::new(translated));
        let mut unharmed = neighbour.queue(0);
        let mut rig = Rig::new(Setup::new(translated));
        let other = unsealed();
        rig.share(&[(other.region, &other.file)]);
        let mut queue = rig.queue(0);
        let mut addr = OTHER_GPA;
        if translated {
            addr = 0x4000_0000;
            rig.map(addr, OTHER_GPA, LEN, ringfence_iommu::Prot::RW);
        }
        assert_eq!(queue.read(0, piece(addr, PAGE)), OK);
        assert_eq!(queue.write(0, piece(addr, PAGE)), OK);

        let used = queue.used_index();
        ftruncate(&other.file, 0).unwrap();
        queue.submit(Kind::Out, 0, &[piece(addr, PAGE)]);
        assert!(wait_for(&queue.err, LONG));
        let error = rig.failure(0).unwrap();
        assert!(error.contains("its file was truncated"), "{error}");
        assert!(error.contains(&format!("{OTHER_GPA:#x}")), "{error}");
        assert_eq!(queue.used_index(), used, "what came of lost memory is not published");

        // The same process serves another driver's memory, and this one's IOMMU.
        unharmed.go_round();
        neighbour.iommu_works();
        rig.iommu_works();
        // Without that memory the device can be used again.
        rig.blk.get_vring_base(0).unwrap();
        rig.share(&[]);
        queue.clear();
        queue.start(&mut rig.blk, 0);
        queue.go_round();
    }
}

#[test]
fn a_truncated_ring_stops_and_the_reason_is_reported() {
    let mut rig = Rig::new(Setup::new(false));
    let other = unsealed();
    rig.share(&[(other.region, &other.file)]);
    let mut neighbour = Rig::new(Setup::new(false));
    let mut unharmed = neighbour.queue(0);
    let page = other.window.part(0, PAGE).unwrap();
    let mut queue = RawQueue::new(0, page, OTHER_GPA, OTHER_USER);
    queue.start(&mut rig.blk, 0);
    queue.go_round();
    ftruncate(&other.file, 0).unwrap();
    rustix::io::write(&queue.kick, &1u64.to_ne_bytes()).unwrap();
    assert!(wait_for(&queue.err, LONG));
    let error = rig.failure(0).unwrap();
    assert!(error.contains("its file was truncated"), "{error}");
    unharmed.go_round();
    rig.iommu_works();
    rig.blk.get_vring_base(0).unwrap();
}

/// A device that went on without its record would lose, in a crash, what it must keep.
#[test]
fn a_queue_whose_record_is_truncated_stops_and_the_reason_is_reported() {
    sigbus::install().unwrap();
    let mut neighbour = Rig::new(Setup::new(false));
    let mut unharmed = neighbour.queue(0);
    for before_start in [false, true] {
        let mut rig = Rig::new(Setup::new(false));
        let protocol = ProtocolFeatures::INFLIGHT_SHMFD | ProtocolFeatures::REPLY_ACK;
        rig.blk.negotiate(F_VERSION_1, protocol).unwrap();
        let (place, _) = rig.blk.inflight(2, SIZE).unwrap().unwrap();
        // A front end's own, which it can make shorter.
        let file = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, place.len).unwrap();
        rig.blk
            .request(ringfence_vhost_user::msg::Request::SetInflight(place), &[file.as_fd()])
            .unwrap();
        let part = rig.pages(1);
        let user = rig.ram.user_addr() + (part.gpa() - rig.ram.gpa());
        let mut queue = RawQueue::new(0, part.window().clone(), part.gpa(), user);
        if before_start {
            ftruncate(&file, 0).unwrap();
            rig.blk.set_vring_num(0, SIZE).unwrap();
            rig.blk.set_vring_addr(0, &queue.addresses()).unwrap();
            assert!(rig.blk.set_vring_kick(0, Some(queue.kick.as_fd())).is_err());
        } else {
            queue.start(&mut rig.blk, 0);
            queue.go_round();
            let used = queue.used_index();
            ftruncate(&file, 0).unwrap();
            queue.submit(Kind::Flush, 0, &[]);
            assert!(wait_for(&queue.err, LONG));
            let error = rig.failure(0).unwrap();
            assert!(error.contains("in-flight region was truncated"), "{error}");
            assert_eq!(queue.used_index(), used, "what is not on record is not published");
            rig.blk.get_vring_base(0).unwrap();
        }
        // Without a record, or with another, it goes on.
        rig.reconnect();
        queue.clear();
        queue.start(&mut rig.blk, 0);
        queue.go_round();
        unharmed.go_round();
    }
}

#[test]
fn a_file_too_short_for_its_region_is_refused_and_the_old_memory_stays() {
    let mut rig = Rig::new(Setup::new(false));
    let mut queue = rig.queue(0);
    let other = unsealed();
    ftruncate(&other.file, LEN / 2).unwrap();
    let table = [(rig.ram.region(), rig.ram.fd()), (other.region, other.file.as_fd())];
    assert!(rig.blk.set_mem_table(&table).is_err());
    queue.go_round();
}
