//! The pages that a block device marks while its driver's memory is moved elsewhere.

use std::{
    collections::BTreeSet,
    fs::File,
    io::Write,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use proptest::prelude::*;
use ringfence_devices::{
    blk::BlkUnit,
    disk::{Disk, Image},
};
use ringfence_mem::{SharedFile, Window};
use ringfence_vhost_user::{F_LOG_ALL, F_PROTOCOL_FEATURES, Frontend, RingAddresses};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_INDIRECT_DESC, F_VERSION_1, blk::Kind, layout};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{
    iotlb::{Behind, Updates, config, iova},
    rig::*,
};

const PAGES: usize = 8;
const FIRST: u64 = GPA / PAGE as u64;
/// Of all memory that there is, in pages.
const ALL: u64 = 1024;

/// A device, and a front end that moves its driver's memory.
enum Topology {
    Plain(Box<Rig>),
    Behind(Box<Behind>),
}

struct Moving {
    topology: Topology,
    queue: RawQueue,
    /// Address, number among the pages of memory, and content.
    pages: Vec<(u64, u64, Window)>,
    ring_page: u64,
    log: SharedFile,
    file: OwnedFd,
}

fn number(ram: &ringfence_mem::GuestRam, window: &Window) -> u64 {
    let base = ram.slice(0, PAGE).unwrap().as_ptr() as u64;
    FIRST + (window.slice().as_ptr() as u64 - base) / PAGE as u64
}

impl Moving {
    fn plain(disk: Disk) -> Moving {
        let mut rig = Rig::new(Setup { disk, ..Setup::new(false) });
        let queue = rig.queue(0);
        let pages: Vec<_> = (0..PAGES)
            .map(|_| {
                let part = rig.pages(1);
                (part.gpa(), part.gpa() / PAGE as u64, part.window().clone())
            })
            .collect();
        let ring_page = number(&rig.ram, &queue.page);
        Moving::new(Topology::Plain(Box::new(rig)), queue, pages, ring_page)
    }

    fn behind(disk: Disk) -> Moving {
        let mut behind = Behind::new(1, config(), disk);
        let queue = behind.queue(0);
        let pages: Vec<_> = (0..PAGES)
            .map(|_| {
                let (page, window) = behind.mapped();
                (iova(page), FIRST + page as u64, window)
            })
            .collect();
        let ring_page = number(&behind.ram, &queue.page);
        Moving::new(Topology::Behind(Box::new(behind)), queue, pages, ring_page)
    }

    fn new(
        topology: Topology,
        queue: RawQueue,
        pages: Vec<(u64, u64, Window)>,
        ring_page: u64,
    ) -> Moving {
        let (log, file) = SharedFile::create(((FIRST + ALL) / 8) as usize).unwrap();
        let mut moving = Moving { topology, queue, pages, ring_page, log, file };
        moving.set_base();
        moving
    }

    fn front<R>(&mut self, ask: impl FnOnce(&mut Frontend) -> R) -> R {
        match &mut self.topology {
            Topology::Plain(rig) => ask(&mut rig.blk),
            Topology::Behind(behind) => ask(&mut behind.main()),
        }
    }

    /// Sets a new log, though in the same place. When this returns the worker has ended the round
    /// in which it marked something in the old one.
    fn set_base(&mut self) {
        let (len, file) = (self.log.len() as u64, self.file.try_clone().unwrap());
        self.front(|front| {
            front.request(
                ringfence_vhost_user::msg::Request::SetLogBase { len, offset: 0 },
                &[file.as_fd()],
            )
        })
        .unwrap();
    }

    fn set(&mut self, on: bool) {
        let platform = match self.topology {
            Topology::Plain(_) => 0,
            Topology::Behind(_) => F_ACCESS_PLATFORM,
        };
        let features = F_VERSION_1 | F_INDIRECT_DESC | platform | F_PROTOCOL_FEATURES;
        self.front(|front| {
            front.set_features(features | if on { F_LOG_ALL } else { 0 }).unwrap();
            // Without acknowledgements, the reply to the next request comes after it.
            front.features().unwrap();
        });
    }

    fn log_ring(&mut self, log: Option<u64>) {
        let addresses = RingAddresses { log, ..self.queue.addresses() };
        self.front(|front| {
            front.set_vring_addr(0, &addresses).unwrap();
            front.features().unwrap();
        });
    }

    /// Runs `ask` on the worker's unit.
    fn ask<R: Send + 'static>(&self, ask: impl FnOnce(&mut BlkUnit) -> R + Send + 'static) -> R {
        match &self.topology {
            Topology::Plain(rig) => rig.on_unit(0, ask),
            Topology::Behind(behind) => behind.on_unit(0, ask),
        }
    }

    /// The marks, which are taken away.
    fn take(&self) -> BTreeSet<u64> {
        let mut marks = BTreeSet::new();
        for page in 0..FIRST + ALL {
            let byte = self.log.u8_at((page / 8) as usize);
            if byte.fetch_and(!(1 << (page % 8)), Ordering::SeqCst) & 1 << (page % 8) != 0 {
                marks.insert(page);
            }
        }
        marks
    }

    fn contents(&self) -> Vec<Vec<u8>> {
        let read = |(_, _, window): &(u64, u64, Window)| {
            let mut bytes = vec![0; PAGE];
            window.read(0, &mut bytes);
            bytes
        };
        self.pages.iter().map(read).collect()
    }
}

/// One request: what it is, and its pieces, each with its page, offset and length in sectors.
type Planned = (u8, u64, Vec<(usize, usize, usize)>);

fn planned() -> impl Strategy<Value = Planned> {
    let piece = (0..PAGES, 0..8usize, 1..=8usize)
        .prop_map(|(page, first, count)| (page, first, count.min(8 - first)));
    (0..4u8, 0..64u64, prop::collection::vec(piece, 1..4))
}

/// A disk that is a file, or memory, no two sectors of which are alike.
fn disk(file: bool) -> Disk {
    let fd = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 1 << 20).unwrap();
    let content: Vec<u8> = (0..1u32 << 18).flat_map(|n| (n / 128 * 3 + n).to_le_bytes()).collect();
    let mut disk = File::from(fd.try_clone().unwrap());
    disk.write_all(&content).unwrap();
    if file {
        return Disk::File(Arc::new(Image::new(fd, 1 << 20)));
    }
    let ram = ringfence_devices::disk::Ram::map(fd.as_fd(), 1 << 20).unwrap();
    Disk::Ram(Arc::new(ram))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn exactly_the_pages_that_a_disk_was_read_into_are_marked(
        rounds in prop::collection::vec(
            (any::<bool>(), any::<bool>(), prop::collection::vec(planned(), 0..8)),
            1..6,
        ),
        translated in any::<bool>(),
        file in any::<bool>(),
    ) {
        // rule D26
        let disk = disk(file);
        let mut moving = if translated { Moving::behind(disk) } else { Moving::plain(disk) };
        // Not memory of the driver: a front end may choose any place for marks.
        let elsewhere = (FIRST + ALL - 2) * PAGE as u64;
        for (on, rings, requests) in rounds {
            moving.log_ring(rings.then_some(elsewhere));
            moving.set(on);
            moving.set_base();
            moving.take();
            let (mut written, mut changed) = (BTreeSet::new(), BTreeSet::new());
            for (kind, sector, pieces) in &requests {
                let kind = [Kind::In, Kind::In, Kind::Out, Kind::GetId][usize::from(*kind)];
                let data: Vec<_> = pieces
                    .iter()
                    .map(|&(page, first, count)| {
                        piece(moving.pages[page].0 + first as u64 * 512, count * 512)
                    })
                    .collect();
                let before = moving.contents();
                prop_assert_eq!(moving.queue.request(kind, *sector, &data), OK);
                for (at, (before, after)) in before.iter().zip(moving.contents()).enumerate() {
                    if *before != after {
                        changed.insert(moving.pages[at].1);
                    }
                }
                // The status, and data: all of it, or a name in the first piece.
                written.insert(moving.ring_page);
                let count = match kind {
                    Kind::In => pieces.len(),
                    Kind::GetId => 1,
                    _ => 0,
                };
                written.extend(pieces[..count].iter().map(|&(page, ..)| moving.pages[page].1));
            }
            moving.set_base();
            let marked = moving.take();
            if !on {
                prop_assert!(marked.is_empty(), "{marked:?}");
                continue;
            }
            prop_assert!(changed.is_subset(&marked), "{changed:?} {marked:?}");
            if rings && !requests.is_empty() {
                written.insert(if translated { moving.ring_page } else { elsewhere / PAGE as u64 });
            }
            // A worker that goes to sleep says so in the ring.
            let asleep = match (rings, translated) {
                (false, _) => BTreeSet::new(),
                (true, true) => BTreeSet::from([moving.ring_page]),
                (true, false) => BTreeSet::from([elsewhere / PAGE as u64]),
            };
            prop_assert!(written.is_subset(&marked), "{written:?} {marked:?}");
            prop_assert!(marked.is_subset(&(&written | &asleep)), "{written:?} {marked:?}");
        }
    }
}

/// A read that the kernel has when logging begins is marked when it is done, though it began before.
#[test]
fn a_read_under_way_when_logging_begins_is_marked() {
    // rule D26
    for broken in [false, true] {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let disk = Disk::File(Arc::new(Image::new(read, 1 << 20)));
        let mut moving = Moving::behind(disk);
        let (addr, page, window) = moving.pages[3].clone();
        moving.queue.submit(Kind::In, 0, &[piece(addr, PAGE)]);
        until("a request under way", || moving.ask(|unit| unit.in_kernel(0)) == 1);
        moving.set(true);
        assert!(moving.take().is_empty());
        if broken {
            // The queue has stopped: nothing is completed, and the kernel writes all the same.
            let at = layout::offsets(SIZE).avail + layout::RING + 2;
            moving.queue.page.write(at, &[0xff, 0xff]);
            moving.queue.set_avail(2);
            until("the queue's end", || moving.ask(|unit| unit.failure(0).is_some()));
        }
        // In two parts: the first is no whole page.
        let mut disk = File::from(write);
        disk.write_all(&[7; 1000]).unwrap();
        until("a part", || holds(&window.part(0, 1000).unwrap(), 7));
        until("its mark", || moving.take().contains(&page));
        disk.write_all(&[7; PAGE - 1000]).unwrap();
        until("the rest", || holds(&window, 7));
        until("its mark", || moving.take().contains(&page));
    }
}

/// A flush on descriptors 8 and 9, until it is done.
fn flush(queue: &mut RawQueue) {
    queue.page.write(2800, &[4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    queue.page.write(3000, &[0xee]);
    queue.desc(8, queue.bus + 2800, 16, layout::DESC_F_NEXT, 9);
    queue.desc(9, queue.bus + 3000, 1, layout::DESC_F_WRITE, 0);
    queue.push(8);
    until("the flush", || holds(&queue.page.part(3000, 1).unwrap(), 0));
}

/// While a guest may be migrated, a request that waits for a translation when its ring stops goes
/// on at the destination: no later request was completed, so that it can be put back.
#[test]
fn what_waits_when_a_guest_moves_is_put_back_with_all_that_came_after_it() {
    let mut moving = Moving::behind(ram_disk(1 << 20));
    moving.set(true);
    let Moving { topology: Topology::Behind(behind), queue, .. } = &mut moving else {
        unreachable!()
    };
    queue.go_round();
    let completed = queue.used_index();
    behind.updates(Updates::Held);
    let (page, data) = behind.mapped();
    fill(&data, 7);
    queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
    behind.wait_missed(page);
    flush(queue);
    behind.round(0);
    assert_eq!((queue.used_index(), behind.on_unit(0, |unit| unit.under_way(0))), (completed, 2));
    let base = behind.main().get_vring_base(0).unwrap();
    assert_eq!((base, queue.used_index()), (completed.into(), completed));
    behind.updates(Updates::Now);
    behind.release(|_| ());
    queue.start(&mut behind.main(), completed);
    assert_eq!((queue.wait().0, queue.wait()), (0, (8, 1)));
    assert!(holds(&data, 0));
}

/// Requests that were done out of order are completed when the guest stays, after all.
#[test]
fn completions_that_were_held_back_are_published_when_logging_ends() {
    let mut moving = Moving::behind(ram_disk(1 << 20));
    moving.set(true);
    let Moving { topology: Topology::Behind(behind), queue, .. } = &mut moving else {
        unreachable!()
    };
    // The ring itself is translated before updates are held back.
    queue.go_round();
    let completed = queue.used_index();
    behind.updates(Updates::Held);
    let (page, _) = behind.mapped();
    queue.submit(Kind::In, 0, &[piece(iova(page), PAGE)]);
    behind.wait_missed(page);
    flush(queue);
    behind.round(0);
    assert_eq!(queue.used_index(), completed);
    moving.set(false);
    assert_eq!(moving.queue.wait(), (8, 1));
    let Topology::Behind(behind) = &moving.topology else { unreachable!() };
    behind.updates(Updates::Now);
    behind.release(|_| ());
    assert_eq!(moving.queue.finish(), OK);
}
