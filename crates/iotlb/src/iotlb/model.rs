//! An update that leads elsewhere, and an invalidation, explored by loom.

use loom::thread;
use ringfence_sync::{
    atomic::{AtomicBool, Ordering},
    model::{self, Memory},
};

use super::*;

/// A slot of the model's smallest node.
const PAGE: u64 = 1 << 56;
const OLD: GuestPhys = GuestPhys(0);
const NEW: GuestPhys = GuestPhys(3 * PAGE);

fn page() -> Range {
    Range::from_len(Iova(PAGE), PAGE).unwrap()
}

/// An entry, and the memory it leads to at first. Loom fails the model if a device's access to the
/// memory overlaps its owner's, or is not ordered with it.
struct World {
    iotlb: Arc<Iotlb>,
    memory: Memory,
    returned: AtomicBool,
}

impl World {
    /// A device's access, with a cache of one translation.
    fn access(&self, reader: &Reader, cache: &mut Option<u64>) {
        if cache.is_none() {
            let found = self.iotlb.domain.translate_run(reader, Iova(PAGE), page());
            *cache = found.map(|found| found.target(Iova(PAGE)));
        }
        match *cache {
            Some(target) if target == OLD.0 => {
                assert!(!self.returned.load(Ordering::Relaxed), "reached after it was returned");
                self.memory.read();
            }
            Some(target) => assert_eq!(target, NEW.0),
            None => {}
        }
    }

    /// The owner has its memory back once `token` is over.
    fn take_back(&self, token: u64) {
        for _ in 0..2 {
            if self.iotlb.shootdown().is_over(token) {
                self.returned.store(true, Ordering::Relaxed);
                self.memory.write();
                return;
            }
            thread::yield_now();
        }
    }
}

fn check(change: fn(&Iotlb) -> u64) {
    model::check(Some(2), move || {
        let shootdown = Shootdown::new(1);
        let config = IotlbConfig { entries: 1, seed: Some(1), ..IotlbConfig::default() };
        let iotlb = Iotlb::new(config, shootdown);
        iotlb.update(page(), OLD, Prot::RW).unwrap();
        let mut reader = iotlb.shootdown().reader().unwrap();
        let (memory, returned) = (Memory::default(), AtomicBool::new(false));
        let world = Arc::new(World { iotlb, memory, returned });
        let theirs = Arc::clone(&world);
        let device = thread::spawn(move || {
            let mut cache = None;
            for _ in 0..2 {
                theirs.access(&reader, &mut cache);
                reader.poll(|gone| {
                    if gone.overlaps(page()) {
                        cache = None;
                    }
                });
            }
            theirs.access(&reader, &mut cache);
        });
        let token = change(&world.iotlb);
        world.take_back(token);
        device.join().unwrap();
    });
}

#[test]
fn after_an_update_that_leads_elsewhere_the_old_translation_is_not_used() {
    // rule D15
    check(|iotlb| iotlb.update(page(), NEW, Prot::RW).unwrap());
}

#[test]
fn nor_after_an_invalidation() {
    // rule D15
    check(|iotlb| iotlb.invalidate(page()).unwrap());
}

#[test]
fn nor_where_it_made_room_for_another_before() {
    // rule D24
    check(|iotlb| {
        let other = Range::from_len(Iova(8 * PAGE), PAGE).unwrap();
        iotlb.update(other, NEW, Prot::RW).unwrap();
        iotlb.update(page(), NEW, Prot::RW).unwrap()
    });
}
