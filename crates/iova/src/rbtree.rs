//! A red-black tree of the taken ranges.

use alloc::boxed::Box;
use core::{fmt, ptr::NonNull};

use intrusive_collections::{
    Bound, KeyAdapter, RBTree, RBTreeLink, intrusive_adapter,
    rbtree::{Cursor, CursorMut},
};
use ringfence_sync::lock::SpinLock;

use crate::{
    AllocError, Allocator, Aperture, FreeError, FreeReason, Request, ReserveError, Stats,
    aperture::GranuleRequest,
};

/// A red-black tree of the taken ranges, searched from the top down: Linux's `iova.c`.
///
/// A search looks at the holes between taken ranges, from the limit downwards (rule [L3]), and
/// takes the first that fits, at its upper end. It starts at a *cached node*: the range that was
/// allocated last, or the one above the last that was freed; one such node for requests limited to
/// 32 bits and one for the others. In the usual pattern (many allocations of the same few sizes)
/// the first hole below it fits. If nothing below the cached node does, the part above is searched
/// too, so that a failure means that there is no such hole (rule [L14]). The failed request is
/// recorded, so that a request for as much or more that is limited to 32 bits fails at once until
/// an address below 4 GiB is freed (rule [L13]).
///
/// Its weakness, for which the other allocators exist: each free moves the cached node up, and the
/// next search walks down again through all live ranges.
///
/// One lock around the tree; about 64 bytes of memory per live range, nothing else.
///
/// [L3]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l3
/// [L14]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l14
/// [L13]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l13
pub struct RbTree {
    aperture: Aperture,
    state: SpinLock<State>,
}

/// A taken range, in granules, both ends included. Never changes while it is in the tree.
struct Node {
    link: RBTreeLink,
    first: u64,
    last: u64,
    reserved: bool,
}

intrusive_adapter!(ByFirst = Box<Node>: Node { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for ByFirst {
    type Key = u64;
    fn get_key(&self, node: &'a Node) -> u64 {
        node.first
    }
}

/// A node to start searches from. It is in the tree: code that removes a node from the tree also
/// moves the cached nodes off it.
#[derive(Clone, Copy)]
struct Cached {
    node: NonNull<Node>,
    first: u64,
    last: u64,
}

struct State {
    tree: RBTree<ByFirst>,
    /// For requests below 4 GiB and for all others; `None` is the top of the space.
    cached_32: Option<Cached>,
    cached: Option<Cached>,
    /// The last search that found nothing, until a range below 4 GiB is freed.
    failed: Option<GranuleRequest>,
    /// The first granule above 4 GiB.
    end_32: u64,
    /// The lowest granule that is handed out.
    low: u64,
    stats: Stats,
}

// SAFETY: the pointers in `cached_32` and `cached` point to nodes that the tree in the same state
// owns, and a node may be used by any thread.
#[allow(unsafe_code)]
unsafe impl Send for State {}

impl RbTree {
    /// A tree with all of `aperture` free.
    pub fn new(aperture: Aperture) -> RbTree {
        RbTree {
            aperture,
            state: SpinLock::new(State {
                tree: RBTree::new(ByFirst::new()),
                cached_32: None,
                cached: None,
                failed: None,
                end_32: aperture.number(1 << 32),
                low: aperture.low,
                stats: Stats::default(),
            }),
        }
    }

    /// The aperture from which it allocates.
    pub fn aperture(&self) -> Aperture {
        self.aperture
    }
}

impl Allocator for RbTree {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        let wanted = self.aperture.wanted(request);
        let wanted = wanted.inspect_err(|_| self.state.lock().stats.failures += 1)?;
        // Allocated before the lock is taken and, if unused, freed after it is released.
        let node = Box::new(Node { link: RBTreeLink::new(), first: 0, last: 0, reserved: false });
        let placed = self.state.lock().alloc(&wanted, node);
        match placed {
            Ok(first) => Ok(self.aperture.start_of(first)),
            Err(_unused) => Err(self.aperture.exhausted(request, wanted.limit)),
        }
    }

    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let node = match self.aperture.range_of(iova, size) {
            Some((first, count)) => self.state.lock().take(first, count),
            None => {
                self.state.lock().stats.rejected_frees += 1;
                Err(FreeReason::NotAllocated)
            }
        };
        node.map(drop).map_err(|reason| FreeError { iova, size, reason })
    }

    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        let Some((low, high)) = self.aperture.clip(first, last)? else { return Ok(()) };
        self.state.lock().reserve(low, high).map_err(|taken| ReserveError::InUse {
            first,
            last,
            taken: self.aperture.start_of(taken).max(first),
        })
    }

    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let checked = match self.aperture.range_of(iova, size) {
            Some((first, count)) => {
                let state = self.state.lock();
                check(&state.tree.upper_bound(Bound::Included(&first)), first, count)
            }
            None => Err(FreeReason::NotAllocated),
        };
        checked.map_err(|reason| FreeError { iova, size, reason })
    }

    fn granule(&self) -> u64 {
        self.aperture.granule()
    }

    fn stats(&self) -> Stats {
        let mut stats = self.state.lock().stats;
        stats.live_bytes *= self.aperture.granule();
        stats
    }
}

impl fmt::Debug for RbTree {
    ringfence_sync::shows!(RbTree as it, aperture: it.aperture);
}

/// Checks that the range at the cursor, the last that starts at or below `number`, may be freed: it
/// starts there and is `count` granules long.
fn check(cursor: &Cursor<'_, ByFirst>, number: u64, count: u64) -> Result<(), FreeReason> {
    match cursor.get() {
        Some(node) if node.last >= number => {
            let exact = node.first == number && node.last - node.first == count - 1;
            if node.reserved {
                Err(FreeReason::Reserved)
            } else if exact {
                Ok(())
            } else {
                Err(FreeReason::WrongRange)
            }
        }
        _ => Err(FreeReason::NotAllocated),
    }
}

impl State {
    /// Finds a place for `wanted` and puts `node` there; gives `node` back if there is none.
    fn alloc(&mut self, wanted: &GranuleRequest, mut node: Box<Node>) -> Result<u64, Box<Node>> {
        let is_32 = wanted.limit < self.end_32;
        if is_32 && self.failed.is_some_and(|failed| wanted.is_at_least(&failed)) {
            self.stats.skipped_searches += 1;
            self.stats.failures += 1;
            return Err(node);
        }
        self.stats.searches += 1;
        let cached = if is_32 { self.cached_32 } else { self.cached };
        // A cached node above the limit would only lengthen the walk.
        let cached = cached.filter(|cached| cached.first <= wanted.limit);
        let steps = &mut self.stats.search_steps;
        let mut found = match cached {
            Some(cached) => {
                let mut cursor = from_cached(&mut self.tree, cached);
                search(&mut cursor, wanted, self.low, steps).map(|place| (cursor, place))
            }
            None => None,
        };
        if found.is_none() {
            // The part not searched yet: everything, or what lies above the cached node.
            let low = match cached {
                Some(cached) => cached.last.checked_add(1),
                None => Some(self.low),
            };
            if let Some(low) = low.filter(|low| *low <= wanted.limit) {
                let mut cursor = self.tree.lower_bound_mut(Bound::Excluded(&wanted.limit));
                found = search(&mut cursor, wanted, low, steps).map(|place| (cursor, place));
            }
        }
        let Some((mut above, first)) = found else {
            self.failed = Some(*wanted);
            self.stats.failures += 1;
            return Err(node);
        };
        let last = first + (wanted.count - 1);
        node.first = first;
        node.last = last;
        // The cursor stands on the range above the hole, or at the top: the place is right below.
        above.insert_before(node);
        above.move_prev();
        let cached = above.get_ptr().map(|node| Cached { node, first, last });
        if last < self.end_32 {
            self.cached_32 = cached;
        } else {
            self.cached = cached;
        }
        self.stats.allocs += 1;
        self.stats.live_ranges += 1;
        self.stats.live_bytes += wanted.count;
        Ok(first)
    }

    /// Takes the range of `count` granules at `number` out of the tree.
    fn take(&mut self, number: u64, count: u64) -> Result<Box<Node>, FreeReason> {
        let mut cursor = self.tree.upper_bound_mut(Bound::Included(&number));
        if let Err(reason) = check(&cursor.as_cursor(), number, count) {
            self.stats.rejected_frees += 1;
            return Err(reason);
        }
        let Some(node) = cursor.remove() else { return Err(FreeReason::NotAllocated) };
        let next = cursor.get_ptr().zip(cursor.get());
        let next = next.map(|(node, next)| Cached { node, first: next.first, last: next.last });
        // There is now a hole above (or at) the cached node: start above it next time. This also
        // moves the cached nodes off the removed node.
        let is_32 = node.last < self.end_32;
        if self.cached_32.is_some_and(|c| c.first == node.first || (is_32 && c.first <= node.first))
        {
            self.cached_32 = next;
        }
        if self.cached.is_some_and(|c| c.first <= node.first) {
            self.cached = next;
        }
        if node.first < self.end_32 {
            self.failed = None;
        }
        self.stats.frees += 1;
        self.stats.live_ranges -= 1;
        self.stats.live_bytes -= node.last - node.first + 1;
        Ok(node)
    }

    /// Reserves `low..=high`, merged with the reserved ranges it touches; fails with a granule in
    /// it that is allocated, if there is one.
    fn reserve(&mut self, low: u64, high: u64) -> Result<(), u64> {
        let (mut first, mut last) = (low, high);
        let mut cursor = self.tree.upper_bound(Bound::Included(&low));
        if cursor.get().is_none_or(|node| node.last < low) {
            cursor.move_next();
        }
        // Checks all that overlap, before anything changes.
        while let Some(node) = cursor.get().filter(|node| node.first <= high) {
            if !node.reserved {
                return Err(node.first.max(low));
            }
            first = first.min(node.first);
            last = last.max(node.last);
            cursor.move_next();
        }
        let mut cursor = self.tree.lower_bound_mut(Bound::Included(&first));
        while cursor.get().is_some_and(|node| node.first <= last) {
            cursor.remove();
        }
        cursor.insert_before(Box::new(Node {
            link: RBTreeLink::new(),
            first,
            last,
            reserved: true,
        }));
        cursor.move_prev();
        let merged = cursor.get_ptr().map(|node| Cached { node, first, last });
        // Any node in the tree will do as a start.
        for cached in [&mut self.cached_32, &mut self.cached] {
            if cached.is_some_and(|cached| first <= cached.first && cached.first <= last) {
                *cached = merged;
            }
        }
        Ok(())
    }
}

/// A cursor at a cached node.
fn from_cached(tree: &mut RBTree<ByFirst>, cached: Cached) -> CursorMut<'_, ByFirst> {
    // SAFETY: a cached node is in the tree of its state (see `Cached`), and there is no other tree
    // in a state.
    #[allow(unsafe_code)]
    unsafe {
        tree.cursor_mut_from_ptr(cached.node.as_ptr())
    }
}

/// The highest place for `wanted` at or above `low`, in the holes below the node at the cursor (or
/// below the top). Leaves the cursor on the node above the hole it found.
fn search(
    cursor: &mut CursorMut<'_, ByFirst>,
    wanted: &GranuleRequest,
    low: u64,
    steps: &mut u64,
) -> Option<u64> {
    loop {
        *steps += 1;
        let high = match cursor.get() {
            Some(ceiling) => ceiling.first.checked_sub(1)?.min(wanted.limit),
            None => wanted.limit,
        };
        let below = cursor.peek_prev();
        let floor = below.get().map(|node| node.last);
        let hole = match floor {
            Some(last) => last.checked_add(1).map(|hole| hole.max(low)),
            None => Some(low),
        };
        if let Some(hole) = hole.filter(|hole| *hole <= high)
            && let Some(place) = wanted.highest_in(hole, high)
        {
            return Some(place);
        }
        if floor.is_none_or(|last| last < low) {
            return None;
        }
        cursor.move_prev();
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
