//! Invalidations while requests wait, run, or come without end.

use std::{fs::File, io::Write as _, sync::atomic::AtomicUsize};

use ringfence_devices::disk::Image;
use ringfence_mem::Region;
use ringfence_virtq::blk::Kind;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;

/// A disk that completes a read when the test writes into it.
pub(super) fn pipe() -> (Disk, File) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    (Disk::File(Arc::new(Image::new(read, 1 << 20))), write.into())
}

#[test]
fn an_invalidation_is_completed_only_when_the_io_that_uses_the_range_has_ended() {
    // rule D15
    let (disk, mut source) = pipe();
    let mut behind = Behind::new(1, config(), disk);
    let mut queue = behind.queue(0);
    for byte in 1..4 {
        let (page, data) = behind.mapped();
        queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
        until("a request under way", || behind.on_unit(0, |unit| unit.in_kernel(0)) == 1);
        let invalidated = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                behind.unmap(page);
                assert!(holds(&data, byte), "completed before the read was done");
                invalidated.store(true, Ordering::Release);
            });
            for _ in 0..20 {
                behind.round(0);
                assert!(!invalidated.load(Ordering::Acquire), "invalidated under a read");
            }
            // A part of the data does not complete the read.
            source.write_all(&[byte; 1000]).unwrap();
            for _ in 0..20 {
                behind.round(0);
                assert!(!invalidated.load(Ordering::Acquire), "invalidated under half a read");
            }
            source.write_all(&[byte; PAGE - 1000]).unwrap();
        });
        assert_eq!(queue.finish(), OK);
    }
}

#[test]
fn an_invalidation_does_not_wait_for_requests_that_wait_themselves() {
    // rule D19
    let (disk, mut source) = pipe();
    let mut behind = Behind::new(1, config(), disk);
    let mut queue = behind.queue(0);
    queue.go_round_with(piece(iova(0), 20));
    let [there, lacking] = [(); 2].map(|()| behind.mapped().0);
    behind.updates(Updates::Held);
    queue.submit(Kind::In, 0, &[piece(iova(there), 512), piece(iova(lacking), 512)]);
    behind.wait_missed(there);
    behind.wait_missed(lacking);
    // One of the two comes, and goes again, and again, while the request waits for the other.
    for _ in 0..50 {
        assert!(behind.front.update(iova(there)));
        behind.round(0);
        behind.invalidate(iova(there), iova(there) + 0xfff);
        assert_eq!(behind.on_unit(0, |unit| unit.in_kernel(0)), 0);
    }
    behind.updates(Updates::Now);
    behind.release(|_| ());
    source.write_all(&[3; 1024]).unwrap();
    assert_eq!(queue.finish(), OK);
}

#[test]
fn flushes_of_the_whole_space_under_load_lose_nothing() {
    // rule D21, rule D22
    for workers in [1, 2] {
        let mut behind = Behind::new(workers, config(), ram_disk(1 << 20));
        let mut queues = [behind.queue(0), behind.queue(1)];
        let pages: Vec<_> = (0..16).map(|_| behind.mapped()).collect();
        let (left, flushes) = (AtomicUsize::new(queues.len()), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for queue in &mut queues {
                let (pages, left, flushes) = (&pages, &left, &flushes);
                scope.spawn(move || {
                    let half = usize::from(queue.index) * 8;
                    for round in 0..400usize {
                        if round == 200 {
                            // Now the ring is away.
                            let before = flushes.load(Ordering::Acquire);
                            until("a flush", || flushes.load(Ordering::Acquire) > before);
                        }
                        let byte = round as u8 ^ 0x80;
                        let (out, back) = (half + round % 4, half + 4 + round % 4);
                        let sector = (half * 8 + round % 8) as u64;
                        fill(&pages[out].1, byte);
                        assert_eq!(queue.write(sector, piece(iova(pages[out].0), PAGE)), OK);
                        assert_eq!(queue.read(sector, piece(iova(pages[back].0), PAGE)), OK);
                        assert!(holds(&pages[back].1, byte), "round {round}");
                    }
                    left.fetch_sub(1, Ordering::Relaxed);
                });
            }
            while left.load(Ordering::Relaxed) > 0 {
                behind.invalidate_all();
                flushes.fetch_add(1, Ordering::Release);
                // The thread that serves misses needs the connection too.
                std::thread::yield_now();
            }
        });
        let sum = behind.options.figures.sum();
        assert_eq!((sum.requests, sum.failed), (1600, 0));
        assert!(sum.away > 0, "no ring was ever away");
    }
}

#[test]
fn a_ring_that_is_started_before_it_is_mapped_waits() {
    // rule D21
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let (page, window) = behind.page();
    let mut queue = RawQueue::new(0, window, iova(page), iova(page));
    queue.start(&mut behind.main(), 0);
    queue.submit(Kind::Flush, 0, &[]);
    behind.wait_missed(page);
    assert!(behind.on_unit(0, |unit| unit.is_away(0)));
    behind.map(page, Access::ReadWrite);
    assert_eq!(queue.finish(), OK);
    // Elsewhere, while it runs: the driver moves the content.
    let (next, window) = behind.page();
    let mut content = vec![0; PAGE];
    queue.page.read(0, &mut content);
    window.write(0, &content);
    queue.addr = iova(next);
    behind.main().set_vring_addr(0, &queue.addresses()).unwrap();
    queue.page.slice().fill_zero();
    queue.page = window;
    queue.bus = iova(next);
    queue.submit(Kind::Flush, 0, &[]);
    behind.wait_missed(next);
    behind.map(next, Access::ReadWrite);
    assert_eq!(queue.finish(), OK);
}

#[test]
fn memory_that_changes_under_requests_that_wait_is_the_new_one() {
    // rule D25
    let mut behind = Behind::new(1, config(), ram_disk(1 << 20));
    let mut queue = behind.queue(0);
    queue.go_round();
    behind.updates(Updates::Held);
    let [page, other] = [(); 2].map(|()| behind.mapped());
    queue.submit(Kind::In, 0, &[piece(iova(page.0), PAGE)]);
    behind.wait_missed(page.0);
    // A region comes, in which the page lies from now on.
    let file = memfd_create("more", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 1 << 20).unwrap();
    let user_addr = 0x7777_0000_0000;
    let region = Region { gpa: 1 << 40, size: 1 << 20, user_addr, mmap_offset: 0 };
    let known = (behind.ram.region(), behind.ram.fd());
    behind.main().set_mem_table(&[known, (region, file.as_fd())]).unwrap();
    fill(&page.1, 9);
    behind.front.table.lock().unwrap().insert(iova(page.0), (user_addr, Access::ReadWrite));
    behind.updates(Updates::Now);
    behind.release(|_| ());
    assert_eq!(queue.finish(), OK);
    assert!(holds(&page.1, 9), "the page that it was, was written");
    // And goes: what led there leads nowhere, what did not still does.
    behind.main().set_mem_table(&[known]).unwrap();
    behind.front.table.lock().unwrap().remove(&iova(page.0));
    assert_eq!(queue.read(0, piece(iova(other.0), PAGE)), OK);
    let missed = behind.missed().len();
    queue.submit(Kind::In, 0, &[piece(iova(page.0), PAGE)]);
    until("a miss", || behind.missed()[missed..].iter().any(|miss| miss.0 == iova(page.0)));
}
