//! Rings that are stopped while requests wait, or while the disk does.

use std::{fs::File, io::Write as _};

use ringfence_devices::disk::{Disk, Image};
use ringfence_iotlb::IotlbConfig;
use ringfence_mem::{Access, Window};
use ringfence_vhost_user::WireError;
use ringfence_virtq::blk::Kind;

use super::{invalidations::pipe, *};

#[test]
fn a_ring_stops_at_once_though_requests_wait_and_goes_on_with_them() {
    // rule D28
    // A stop that waited for the request would take longer than the front end waits.
    let config = IotlbConfig { timeout: 10 * LONG, ..config() };
    let mut behind = Behind::new(1, config, ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    queue.go_round();
    let completed = queue.used_index();
    behind.updates(Updates::Held);
    let (page, data) = behind.mapped();
    fill(&data, 7);
    queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
    behind.wait_missed(page);
    // No miss is resolved meanwhile, as with a VMM that waits for this reply.
    let base = behind.main().get_vring_base(0).unwrap();
    assert_eq!((base, queue.used_index()), (completed.into(), completed));
    assert_eq!(queue.status(), 0xee);
    behind.updates(Updates::Now);
    behind.release(|_| ());
    queue.start(&mut behind.main(), completed);
    assert_eq!(queue.finish(), OK);
    assert!(holds(&data, 0));
}

#[test]
fn a_device_without_a_running_ring_sends_no_misses_and_still_replies() {
    // rule D27
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    queue.go_round();
    behind.updates(Updates::Never);
    let (page, _) = behind.mapped();
    queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
    behind.wait_missed(page);
    behind.main().get_vring_base(0).unwrap();
    behind.settle();
    let (missed, used) = (behind.missed().len(), queue.used_index());
    // Longer than the intervals after which a miss is sent, and a worker looks, again.
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(10));
        behind.invalidate_all();
        event_and_round(&behind, &queue);
    }
    behind.settle();
    assert_eq!((behind.missed().len(), queue.used_index()), (missed, used));
}

#[test]
fn a_request_whose_failure_cannot_be_reported_is_given_back_all_the_same() {
    let config = IotlbConfig { again: Duration::from_millis(1), ..config() };
    let mut behind = Behind::new(1, config, ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    for _ in 0..10 {
        behind.updates(Updates::Now);
        queue.go_round();
        behind.updates(Updates::Never);
        let [data, status] = [(); 2].map(|()| behind.mapped().0);
        queue.lay(Kind::In, 0, &[piece(iova(data), PAGE)]);
        queue.desc(2, iova(status), 1, 2, 0);
        queue.push(0);
        behind.wait_missed(status);
        overtake(&mut queue);
        // It fails, and not even that can be reported: the status is missing, too.
        let base = behind.main().get_vring_base(0).unwrap();
        behind.settle();
        let missed = behind.missed().len();
        assert_eq!(queue.wait(), (0, 0));
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(1));
            behind.round(0);
        }
        behind.settle();
        assert_eq!(behind.missed().len(), missed);
        behind.updates(Updates::Now);
        queue.start(&mut behind.main(), base as u16);
    }
}

/// A flush on descriptors 8 and 9, which is completed while an earlier request waits.
fn overtake(queue: &mut RawQueue) {
    queue.page.write(2800, &[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    queue.desc(8, queue.bus + 2800, 16, 1, 9);
    queue.desc(9, queue.bus + 3000, 1, 2, 0);
    queue.push(8);
    assert_eq!(queue.wait(), (8, 1));
}

fn event_and_round(behind: &Behind, queue: &RawQueue) {
    ringfence_run::event::signal(&queue.kick);
    behind.round(0);
}

#[test]
fn requests_that_ran_before_one_that_waits_are_completed() {
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    queue.go_round();
    let completed = queue.used_index();
    behind.updates(Updates::Held);
    let (page, _) = behind.mapped();
    // The first waits; the second, taken after it, is done.
    queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
    behind.wait_missed(page);
    overtake(&mut queue);
    // It cannot go back behind one that was completed: it is completed with an error.
    let base = behind.main().get_vring_base(0).unwrap();
    assert_eq!(base, u32::from(completed) + 2);
    assert_eq!(queue.finish(), IOERR);
}

#[test]
fn requests_on_record_go_on_in_the_next_life_of_the_ring() {
    for overtaken in [false, true] {
        let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
        let region = behind.main().inflight(4, SIZE).unwrap().unwrap();
        behind
            .main()
            .request(ringfence_vhost_user::msg::Request::SetInflight(region.0), &[region.1.as_fd()])
            .unwrap();
        let mut queue = behind.queue(0);
        queue.go_round();
        let completed = queue.used_index();
        behind.updates(Updates::Held);
        let (page, data) = behind.mapped();
        fill(&data, 7);
        queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
        behind.wait_missed(page);
        if overtaken {
            // A later one is completed: the one that waits cannot go back into the ring.
            overtake(&mut queue);
        }
        let base = behind.main().get_vring_base(0).unwrap();
        assert_eq!(base, u32::from(completed) + if overtaken { 2 } else { 0 });
        assert_eq!(queue.take(), None, "it was completed without being done");
        behind.updates(Updates::Now);
        behind.release(|_| ());
        // Whatever base the front end sets.
        queue.start(&mut behind.main(), completed);
        assert_eq!(queue.finish(), OK);
        assert!(holds(&data, 0));
        queue.go_round();
        assert_eq!(behind.options.figures.sum().failed, 0);
    }
}

#[test]
fn a_disk_that_hangs_holds_up_its_own_ring_and_no_other() {
    // rules D15, D28
    // When the disk completes them at last the next front end is there, or none is.
    for next_is_there in [true, false] {
        let (disk, mut source) = pipe();
        let mut behind = Behind::connect(workers(1), options(config(), disk));
        let (mut queue, mut neighbour) = (behind.queue(0), behind.queue(1));
        let (page, data) = behind.mapped();
        let (name, _) = behind.mapped();
        neighbour.go_round_with(piece(iova(name), 20));
        queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
        until("a request under way", || behind.on_unit(0, |unit| unit.in_kernel(0)) == 1);
        std::thread::scope(|scope| {
            let stopped = scope.spawn(|| behind.main().get_vring_base(0));
            until("a ring that stops", || behind.on_unit(0, |unit| unit.is_stopping(0)));
            (0..100).for_each(|_| neighbour.go_round_with(piece(iova(name), 20)));
            assert!(!stopped.is_finished(), "the kernel has a request of the ring");
            behind.hang_up();
            assert!(stopped.join().unwrap().is_err());
        });
        let why = behind.ended().unwrap_err().to_string();
        assert!(why.contains("not completed"), "{why}");
        // What the kernel may still write to stays. The next front end is there at once; its rings are
        // served when no old write can come after a new one.
        let (workers, options) = (Arc::clone(&behind.workers), behind.options.clone());
        let figures = Arc::clone(&options.figures);
        assert_eq!(figures.stuck(), 1);
        let mut next = Behind::connect(workers, options);
        let mut held = next.queue(0);
        let (name, _) = next.mapped();
        next.push(name);
        held.submit(Kind::GetId, 0, &[piece(iova(name), 20)]);
        next.round(0);
        assert_eq!(held.take(), None, "an old write could come after it");
        let next = Some(next).filter(|_| next_is_there);
        // So that the worker sleeps, most likely: nothing wakes it.
        std::thread::sleep(Duration::from_millis(20));
        source.write_all(&[5; PAGE]).unwrap();
        until("the end of the I/O", || holds(&data, 5));
        until("the ring is free", || figures.stuck() == 0);
        if next.is_some() {
            assert_eq!(held.finish(), OK);
        }
        drop(next);
        let mut last = Behind::connect(Arc::clone(&behind.workers), behind.options.clone());
        let mut queue = last.queue(0);
        let (page, data) = last.mapped();
        queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
        source.write_all(&[6; PAGE]).unwrap();
        assert_eq!(queue.finish(), OK);
        assert!(holds(&data, 6));
        assert_eq!(unmapped_by(&behind.workers), 0);
    }
}

/// A disk that completes a read when something is written to the other end, and not before.
fn own_pipe() -> (Disk, File) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let image = Image::new(reader, 1 << 20).with_own_buffers();
    (Disk::File(Arc::new(image)), writer.into())
}

/// A queue with a read, into a page of sevens, that the disk has not completed.
struct Reading {
    source: File,
    behind: Behind,
    queue: RawQueue,
    page: usize,
    data: Window,
}

fn reading() -> Reading {
    let (disk, source) = own_pipe();
    let mut behind = Behind::connect(workers(1), options(config(), disk));
    let mut queue = behind.queue(0);
    let (page, data) = behind.mapped();
    fill(&data, 7);
    queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
    until("a request under way", || behind.on_unit(0, |unit| unit.in_kernel(0)) == 1);
    Reading { source, behind, queue, page, data }
}

#[test]
fn an_invalidation_does_not_wait_for_a_disk_that_has_no_memory_of_the_guest() {
    // rule D15
    // The page gets another owner before the disk completes the read, or stays.
    for is_taken in [true, false] {
        let Reading { mut source, behind, mut queue, page, data } = reading();
        if is_taken {
            behind.unmap(page);
        } else {
            behind.invalidate(iova(page), iova(page) + 0xfff);
        }
        assert_eq!(behind.on_unit(0, |unit| unit.in_kernel(0)), 1, "the disk has not completed");
        source.write_all(&[5; PAGE]).unwrap();
        // By the translation that there is then: a new miss is sent.
        assert_eq!(queue.finish(), if is_taken { IOERR } else { OK });
        assert!(holds(&data, if is_taken { 7 } else { 5 }));
    }
}

#[test]
fn a_read_that_does_not_end_holds_up_no_later_ring_and_its_data_goes_nowhere() {
    // rule D28
    let Reading { mut source, mut behind, data, .. } = reading();
    behind.hang_up();
    // The last update may be in use before the front end gets its reply.
    let ended = behind.ended();
    assert!(matches!(ended, Ok(()) | Err(ServeError::Wire(WireError::HungUp { .. }))), "{ended:?}");
    let figures = Arc::clone(&behind.options.figures);
    assert_eq!((figures.stuck(), figures.holds()), (1, false));
    let mut next = Behind::connect(Arc::clone(&behind.workers), behind.options.clone());
    let mut queue = next.queue(0);
    let (name, _) = next.mapped();
    queue.go_round_with(piece(iova(name), 20));
    // The first bytes are the first reader's.
    let (page, new) = next.mapped();
    source.write_all(&[5; PAGE]).unwrap();
    until("the end of the old I/O", || figures.stuck() == 0);
    queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
    source.write_all(&[6; PAGE]).unwrap();
    assert_eq!(queue.finish(), OK);
    assert!(holds(&new, 6) && holds(&data, 7));
}

#[test]
fn what_goes_by_way_of_own_buffers_arrives() {
    // Requests in several pieces, buffers that end anywhere, and more than there are buffers for at once.
    let file = tempfile::tempfile().unwrap();
    file.set_len(8 << 20).unwrap();
    let image = Image::new(file.into(), 8 << 20).with_own_buffers();
    let mut behind = Behind::new(1, config(), Disk::File(Arc::new(image)));
    let mut queue = behind.queue(0);
    let (base, at, len) = (iova(1 << 16), 256 * PAGE, 700 * PAGE);
    let user_addr = behind.ram.user_addr() + at as u64;
    let (last, access) = (base + len as u64 - 1, Some(Access::ReadWrite));
    behind.main().iotlb(&Iotlb::Update { first: base, last, user_addr, access }).unwrap();
    let byte = |at: usize| (at / 512 * 7 + at % 509) as u8;
    let memory = behind.ram.window(at, len).unwrap();
    for (sizes, sector) in [
        (vec![512], 0),
        (vec![1, 510, 1], 3),
        (vec![4096 * 9 + 100, 412, 4096 * 30], 100),
        (vec![1 << 20, 1 << 20, 512 << 10, 100, 412], 2000),
    ] {
        let total: usize = sizes.iter().sum();
        let expected: Vec<u8> = (0..total).map(byte).collect();
        memory.write(0, &expected);
        let mut at = base;
        let mut pieces = Vec::new();
        for size in &sizes {
            pieces.push(piece(at, *size));
            at += *size as u64;
        }
        assert_eq!(queue.request(Kind::Out, sector, &pieces), OK, "{sizes:?}");
        memory.write(0, &vec![0xaa; total + 1]);
        assert_eq!(queue.request(Kind::In, sector, &pieces), OK, "{sizes:?}");
        let mut found = vec![0; total + 1];
        memory.read(0, &mut found);
        assert!(found[..total] == expected && found[total] == 0xaa, "{sizes:?}");
    }
}
