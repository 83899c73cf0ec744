//! The peers: what they store, and how they look it up.

use std::{collections::BTreeMap, sync::RwLock};

use parking_lot::Mutex;
use vm_memory::{GuestAddress, Permissions, iommu::Iotlb};

/// A table that is looked up and changed by one thread.
pub(super) trait Table: Default + Send + Sync {
    /// The target of `addr`, if all of `len` bytes are mapped; else `None`.
    fn lookup(&self, addr: u64, len: u64) -> Option<u64>;
    /// Inserts an entry where there is none.
    fn insert(&mut self, iova: u64, len: u64, target: u64);
    /// Removes an entry.
    fn remove(&mut self, iova: u64, len: u64);
}

/// vm-memory's.
#[derive(Default)]
pub(super) struct VmMemory(Iotlb);

impl Table for VmMemory {
    #[inline]
    fn lookup(&self, addr: u64, len: u64) -> Option<u64> {
        let access = Permissions::Read;
        let mut found = Iotlb::lookup(&self.0, GuestAddress(addr), len as usize, access).ok()?;
        found.next().map(|range| range.base.0)
    }

    fn insert(&mut self, iova: u64, len: u64, target: u64) {
        let (iova, target) = (GuestAddress(iova), GuestAddress(target));
        // It never refuses.
        let _ = self.0.set_mapping(iova, target, len as usize, Permissions::ReadWrite);
    }

    fn remove(&mut self, iova: u64, len: u64) {
        self.0.invalidate_mapping(GuestAddress(iova), len as usize);
    }
}

/// A B-tree: by first address, the last one, the target and the permissions.
#[derive(Default)]
pub(super) struct Map(BTreeMap<u64, (u64, u64, u8)>);

impl Table for Map {
    #[inline]
    fn lookup(&self, addr: u64, len: u64) -> Option<u64> {
        let (mut at, mut left, mut found) = (addr, len, None);
        loop {
            let (&first, &(last, target, prot)) = self.0.range(..=at).next_back()?;
            if at > last || prot & 1 == 0 {
                return None;
            }
            found = found.or(Some(target + (at - first)));
            let more = last - at + 1;
            if more >= left {
                return found;
            }
            (at, left) = (at + more, left - more);
        }
    }

    fn insert(&mut self, iova: u64, len: u64, target: u64) {
        self.0.insert(iova, (iova + (len - 1), target, 3));
    }

    fn remove(&mut self, iova: u64, _: u64) {
        self.0.remove(&iova);
    }
}

/// A sorted list, walked from its beginning.
#[derive(Default)]
pub(super) struct SortedList(Option<Box<Node>>);

struct Node {
    iova: u64,
    size: u64,
    target: u64,
    prot: u8,
    next: Option<Box<Node>>,
}

impl SortedList {
    /// The most entries that it is measured with, as many as such a list holds.
    pub(super) const MOST: u64 = 2048;

    /// The link to the first node for which `stop` is true, or the last link.
    fn link(&mut self, stop: impl Fn(&Node) -> bool) -> &mut Option<Box<Node>> {
        let mut link = &mut self.0;
        while link.as_ref().is_some_and(|node| !stop(node)) {
            link = &mut link.as_mut().expect("looked at above").next;
        }
        link
    }
}

impl Table for SortedList {
    #[inline]
    fn lookup(&self, addr: u64, len: u64) -> Option<u64> {
        let (mut at, mut left, mut found) = (addr, len, None);
        let mut next = self.0.as_deref();
        while let Some(node) = next {
            if at < node.iova {
                break;
            }
            if at - node.iova < node.size {
                if node.prot & 1 == 0 {
                    break;
                }
                found = found.or(Some(node.target + (at - node.iova)));
                let more = node.size - (at - node.iova);
                if more >= left {
                    return found;
                }
                (at, left) = (at + more, left - more);
            }
            next = node.next.as_deref();
        }
        None
    }

    fn insert(&mut self, iova: u64, len: u64, target: u64) {
        let link = self.link(|node| node.iova > iova);
        let next = link.take();
        *link = Some(Box::new(Node { iova, size: len, target, prot: 3, next }));
    }

    fn remove(&mut self, iova: u64, _: u64) {
        let link = self.link(|node| node.iova >= iova);
        if link.as_ref().is_some_and(|node| node.iova == iova) {
            *link = link.take().and_then(|node| node.next);
        }
    }
}

impl Drop for SortedList {
    fn drop(&mut self) {
        // One after the other: a list of boxes would else be dropped by recursion.
        let mut next = self.0.take();
        while let Some(mut node) = next {
            next = node.next.take();
        }
    }
}

/// A table that threads share.
pub(super) trait Shared: Sync {
    /// What a single thread uses.
    type Alone: Table;

    fn alone(&mut self) -> &mut Self::Alone;

    fn shared_lookup(&self, addr: u64, len: u64) -> Option<u64>;
    /// Removes an entry and inserts it again.
    fn renew(&self, iova: u64, len: u64, target: u64);
}

impl<T: Table> Shared for RwLock<T> {
    type Alone = T;

    fn alone(&mut self) -> &mut T {
        self.get_mut().expect("no lookup panics")
    }

    #[inline]
    fn shared_lookup(&self, addr: u64, len: u64) -> Option<u64> {
        self.read().expect("no lookup panics").lookup(addr, len)
    }

    fn renew(&self, iova: u64, len: u64, target: u64) {
        let mut table = self.write().expect("no lookup panics");
        table.remove(iova, len);
        table.insert(iova, len, target);
    }
}

/// A B-tree behind one lock, by one thread or several.
impl Table for Mutex<Map> {
    #[inline]
    fn lookup(&self, addr: u64, len: u64) -> Option<u64> {
        self.lock().lookup(addr, len)
    }

    fn insert(&mut self, iova: u64, len: u64, target: u64) {
        self.lock().insert(iova, len, target);
    }

    fn remove(&mut self, iova: u64, len: u64) {
        self.lock().remove(iova, len);
    }
}

impl Shared for Mutex<Map> {
    type Alone = Mutex<Map>;

    /// Its lock is taken in any case.
    fn alone(&mut self) -> &mut Mutex<Map> {
        self
    }

    #[inline]
    fn shared_lookup(&self, addr: u64, len: u64) -> Option<u64> {
        self.lookup(addr, len)
    }

    fn renew(&self, iova: u64, len: u64, target: u64) {
        let mut table = self.lock();
        table.remove(iova, len);
        table.insert(iova, len, target);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn behaves<T: Table>() {
        let mut table = T::default();
        for entry in [3, 1, 2, 0u64] {
            table.insert(entry << 12, 4096, (9 - entry) << 12);
        }
        for entry in 0..4u64 {
            assert_eq!(table.lookup(entry << 12 | 5, 64), Some((9 - entry) << 12 | 5));
        }
        assert_eq!(table.lookup(0xfff, 2), Some(0x9fff));
        assert_eq!((table.lookup(0x3fff, 2), table.lookup(0x4000, 1)), (None, None));
        table.remove(0x1000, 4096);
        assert_eq!((table.lookup(0x1000, 1), table.lookup(0xfff, 2)), (None, None));
        assert_eq!(table.lookup(0x2000, 1), Some(7 << 12));
    }

    #[test]
    fn every_peer_finds_what_is_there_and_nothing_else() {
        behaves::<VmMemory>();
        behaves::<Map>();
        behaves::<SortedList>();
        behaves::<Mutex<Map>>();
    }
}
