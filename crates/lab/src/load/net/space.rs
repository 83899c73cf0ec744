//! The driver's memory, and the addresses by which the device sees it.

use std::sync::Arc;

use anyhow::{Context, Result};
use ringfence_mem::{GuestRam, MemError, PAGE_SIZE};

use crate::random::SplitMix;

/// Bytes of memory: as much as the largest entry covers. Only what is used takes memory.
const RAM: usize = 1 << 30;
/// Where memory begins for a device without an IOMMU.
const GUEST_BASE: u64 = 1 << 32;
/// Where it begins behind one: a multiple of any entry.
const IOVA_BASE: u64 = 1 << 40;
/// The rings lie before this offset, the buffers from it on.
pub(crate) const RINGS: u64 = 2 << 20;
const BUFFERS: u64 = RINGS;
/// Fresh addresses begin here; each queue has a span of its own.
const FRESH_BASE: u64 = 1 << 41;
/// Pages of fresh addresses a queue has, after which it begins again: 256 GiB. What was mapped
/// there was unmapped long ago.
const FRESH_PAGES: u64 = 1 << 26;
const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes of a buffer that a device may write: packets may take several buffers.
pub(crate) const ROOM: u32 = 1024;

/// The addresses by which the device sees memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// Guest-physical ones; ACCESS_PLATFORM is not negotiated.
    Physical,
    /// IOVAs that map to the same memory throughout.
    Static {
        /// How much one UPDATE covers, bytes: a power of two from 4 KiB to 1 GiB.
        entry: u64,
        /// Whether neighbouring entries map to neighbouring memory, so that a back end can merge
        /// them; otherwise no two do.
        mergeable: bool,
    },
    /// Each use of a buffer has an IOVA of its own, a page, which is unmapped after the use. The
    /// rings stay where they are.
    Fresh {
        /// Whether a burst's translations are sent before the burst is published; otherwise the
        /// back end sends misses.
        push: bool,
    },
}

impl Addressing {
    /// Whether there is an IOMMU.
    pub fn translated(self) -> bool {
        self != Addressing::Physical
    }

    /// Whether each use of a buffer has an address of its own.
    pub fn is_fresh(self) -> bool {
        matches!(self, Addressing::Fresh { .. })
    }
}

/// A range of IOVAs and its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The first address.
    pub first: u64,
    /// The last address, inclusive.
    pub last: u64,
    /// The address of `first` in this process.
    pub user_addr: u64,
}

/// Memory, and where it lies for the device.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) addressing: Addressing,
    /// Bytes between two buffers.
    stride: u64,
    /// Which granule of buffers the one at an IOVA is, and the reverse; empty if they are in order.
    granule_at: Vec<u32>,
    iova_of: Vec<u32>,
    /// For each queue, which buffer each of the last addresses was given to.
    fresh: [Fresh; 2],
}

/// The fresh addresses of a queue.
#[derive(Debug)]
struct Fresh {
    base: u64,
    next: u64,
    /// The page number and its buffer, at the number modulo the length.
    live: Box<[(u64, u32)]>,
}

/// No page has this number.
const NONE: u64 = u64::MAX;

impl Space {
    /// Memory for `buffers` buffers in all, each with pages of its own if they are `apart` or their
    /// addresses are fresh.
    ///
    /// # Errors
    /// The system has no memory, or they do not fit.
    ///
    /// # Panics
    /// If [`Addressing`] does not allow the entry's size.
    pub(crate) fn new(addressing: Addressing, buffers: u32, apart: bool) -> Result<Space> {
        let stride = if apart || addressing.is_fresh() { PAGE } else { PAGE / 2 };
        let ram = GuestRam::new(RAM, GUEST_BASE)?;
        let bytes = (u64::from(buffers) * stride).next_multiple_of(BUFFERS);
        if BUFFERS + bytes > RAM as u64 {
            return Err(MemError::Full { len: bytes, left: RAM as u64 - BUFFERS }.into());
        }
        let mut granule_at = Vec::new();
        if let Addressing::Static { entry, mergeable } = addressing {
            assert!(entry.is_power_of_two() && (PAGE..=RAM as u64).contains(&entry));
            // An entry larger than the area of the rings covers all memory: there is only one.
            if !mergeable && entry <= BUFFERS {
                granule_at = scattered((bytes / entry) as u32);
            }
        }
        let mut iova_of = vec![0; granule_at.len()];
        for (iova, granule) in granule_at.iter().enumerate() {
            iova_of[*granule as usize] = iova as u32;
        }
        let fresh = [0, 1].map(|queue| Fresh {
            base: FRESH_BASE + queue * FRESH_PAGES * PAGE,
            next: 0,
            // More than are ever mapped: a buffer has one address at a time.
            live: vec![(NONE, 0); buffers.next_power_of_two() as usize].into(),
        });
        Ok(Space { ram, addressing, stride, granule_at, iova_of, fresh })
    }

    /// Where a buffer begins. Not all at the same offset in their page: they would compete for a
    /// few lines of the cache.
    pub(crate) fn buffer(&self, buffer: u32) -> u64 {
        let colour = u64::from(buffer) % (self.stride / 128) * 64;
        BUFFERS + u64::from(buffer) * self.stride + colour
    }

    /// The device's address of the byte at `offset`, in rings and in buffers with lasting
    /// addresses.
    pub(crate) fn device_addr(&self, offset: u64) -> u64 {
        let Addressing::Static { entry, .. } = self.addressing else {
            let base = if self.addressing.translated() { IOVA_BASE } else { GUEST_BASE };
            return base + offset;
        };
        IOVA_BASE + moved(&self.iova_of, offset, entry)
    }

    /// Maps a fresh address, in `queue`, for the page of a buffer; returns the buffer's address.
    pub(crate) fn map(&mut self, queue: usize, buffer: u32) -> u64 {
        let into = self.buffer(buffer) % PAGE;
        let fresh = &mut self.fresh[queue];
        let page = fresh.next % FRESH_PAGES;
        fresh.next += 1;
        *fresh.place(page) = (page, buffer);
        fresh.base + page * PAGE + into
    }

    /// Unmaps the address.
    pub(crate) fn unmap(&mut self, addr: u64) {
        for fresh in &mut self.fresh {
            if let Some((page, _)) = fresh.live(addr) {
                fresh.place(page).0 = NONE;
            }
        }
    }

    /// The entry for a miss at `iova`; `None`: nothing is mapped there.
    pub(crate) fn entry(&self, iova: u64) -> Option<Entry> {
        let found = |fresh: &Fresh| Some((fresh.base, fresh.live(iova)?));
        if let Some((base, (page, buffer))) = self.fresh.iter().find_map(found) {
            let offset = self.buffer(buffer) / PAGE * PAGE;
            return Some(self.at(base + page * PAGE, PAGE, offset));
        }
        let offset = iova.checked_sub(IOVA_BASE).filter(|&offset| offset < RAM as u64)?;
        let entry = match self.addressing {
            Addressing::Physical => return None,
            Addressing::Static { entry, .. } => entry,
            Addressing::Fresh { .. } if offset >= BUFFERS => return None,
            Addressing::Fresh { .. } => PAGE,
        };
        let start = offset / entry * entry;
        Some(self.at(IOVA_BASE + start, entry, moved(&self.granule_at, start, entry)))
    }

    /// The entry for an address that is mapped.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn mapped(&self, addr: u64) -> Result<Entry> {
        self.entry(addr).with_context(|| format!("no entry for a ring at {addr:#x}"))
    }

    fn at(&self, first: u64, len: u64, offset: u64) -> Entry {
        Entry { first, last: first + (len - 1), user_addr: self.ram.user_addr() + offset }
    }
}

impl Fresh {
    fn place(&mut self, page: u64) -> &mut (u64, u32) {
        &mut self.live[page as usize & (self.live.len() - 1)]
    }

    /// The page at an address, and its buffer, if it is mapped.
    fn live(&self, addr: u64) -> Option<(u64, u32)> {
        let page = addr.checked_sub(self.base)? / PAGE;
        let found = self.live[page as usize & (self.live.len() - 1)];
        (page < FRESH_PAGES && found.0 == page).then_some(found)
    }
}

/// Where the byte at `offset` is once its granule of buffers is where `to` says, if it does.
fn moved(to: &[u32], offset: u64, entry: u64) -> u64 {
    let granule = offset.checked_sub(BUFFERS).map(|into| (into / entry) as usize);
    match granule.and_then(|granule| to.get(granule)) {
        Some(&granule) => BUFFERS + u64::from(granule) * entry + offset % entry,
        None => offset,
    }
}

/// The numbers below `n` in an order in which none is followed by its successor: what lies side by
/// side at one end does not at the other. The same order each time.
fn scattered(n: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..n).rev().collect();
    let mut random = SplitMix(0x2545_f491_4f6c_dd1d);
    for _ in 0..4 * n {
        let [a, b] = [(); 2].map(|()| random.index(n as usize));
        order.swap(a, b);
        let follows = |at: usize| at > 0 && order[at] == order[at - 1] + 1;
        if [a, b].iter().any(|&at| follows(at) || at + 1 < order.len() && follows(at + 1)) {
            order.swap(a, b);
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUFFER_COUNT: u32 = 6144;

    #[test]
    fn no_number_is_followed_by_its_successor() {
        for n in [1, 2, 3, 4, 64, 1536] {
            let order = scattered(n);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..n), "each number once");
            assert!(order.windows(2).all(|pair| pair[1] != pair[0] + 1), "{n}");
        }
        assert_ne!(scattered(64), (0..64).rev().collect::<Vec<_>>(), "but mixed");
    }

    #[test]
    fn every_byte_of_a_buffer_is_where_its_entry_says() {
        for entry in [4096, 65536, 2 << 20, 1 << 30] {
            for mergeable in [true, false] {
                let space =
                    Space::new(Addressing::Static { entry, mergeable }, BUFFER_COUNT, false)
                        .unwrap();
                for buffer in [0, 1, 2, 33, BUFFER_COUNT - 1] {
                    for into in [0, u64::from(ROOM) - 1] {
                        let offset = space.buffer(buffer) + into;
                        let addr = space.device_addr(offset);
                        let found = space.entry(addr).unwrap();
                        assert!((found.first..=found.last).contains(&addr));
                        assert_eq!(found.last - found.first + 1, entry);
                        assert_eq!(
                            found.user_addr + (addr - found.first),
                            space.ram.user_addr() + offset
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn entries_can_be_merged_or_cannot() {
        for (entry, mergeable) in [(4096, true), (4096, false), (65536, false), (2 << 20, false)] {
            let space =
                Space::new(Addressing::Static { entry, mergeable }, BUFFER_COUNT, false).unwrap();
            let from = IOVA_BASE + BUFFERS;
            let end = from + u64::from(BUFFER_COUNT) * 2048;
            let entries: Vec<Entry> =
                (from..end).step_by(entry as usize).map(|at| space.entry(at).unwrap()).collect();
            let joined = |pair: &[Entry]| pair[0].user_addr + entry == pair[1].user_addr;
            assert!(entries.windows(2).all(|pair| joined(pair) == mergeable), "{entry}");
        }
    }

    #[test]
    fn rings_lie_in_one_piece() {
        let space =
            Space::new(Addressing::Static { entry: 4096, mergeable: false }, BUFFER_COUNT, false)
                .unwrap();
        assert_eq!(space.device_addr(0) + 0x5000, space.device_addr(0x5000));
    }

    #[test]
    fn a_fresh_address_is_one_page_and_ends_with_its_use() {
        let mut space = Space::new(Addressing::Fresh { push: false }, 64, false).unwrap();
        let (one, two) = (space.map(0, 5), space.map(1, 6));
        assert_ne!(one / PAGE, two / PAGE);
        for (addr, buffer) in [(one, 5), (two, 6)] {
            let entry = space.entry(addr).unwrap();
            assert_eq!(entry.last - entry.first + 1, PAGE);
            let offset = space.buffer(buffer);
            assert_eq!(entry.user_addr + (addr - entry.first), space.ram.user_addr() + offset);
        }
        space.unmap(one);
        assert_eq!(space.entry(one), None);
        assert!(space.entry(two).is_some());
        assert_ne!(space.map(0, 5), one, "the next use has another");
        assert!(space.entry(IOVA_BASE).is_some(), "the rings");
        assert_eq!(space.entry(IOVA_BASE + BUFFERS), None, "the buffers have no lasting address");
    }

    proptest! {
        #[test]
        fn no_address_at_all_is_translated_wrongly(iova: u64, fresh: bool) {
            let addressing = match fresh {
                true => Addressing::Fresh { push: false },
                false => Addressing::Static { entry: 4096, mergeable: false },
            };
            let space = Space::new(addressing, 64, false).unwrap();
            if let Some(entry) = space.entry(iova) {
                prop_assert!((entry.first..=entry.last).contains(&iova));
                prop_assert!(entry.user_addr >= space.ram.user_addr());
                prop_assert!(entry.user_addr - space.ram.user_addr() < RAM as u64);
            }
        }
    }
}
