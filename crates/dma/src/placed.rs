//! Where a buffer was mapped. From map to unmap a mapping moves a dozen times, through batches and
//! queues, so that what moves should be a pointer.

use core::{
    cell::RefCell,
    ops::{Deref, DerefMut},
};

use ringfence_iommu::Iova;

use crate::{
    bounce::{Bounced, Slot},
    flush::Span,
    layout::Segment,
};

/// Where a buffer was mapped.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) iova: Iova,
    pub(crate) len: u64,
    /// `None` under policy `off`, and for a copy.
    pub(crate) span: Option<Span>,
    /// The copy, if the device works on one.
    pub(crate) bounced: Option<Bounced>,
    /// The slot of a copy that has ended and is watched, or of a buffer in pool memory.
    pub(crate) slot: Option<Slot>,
    pub(crate) segments: Vec<Segment>,
    /// Whether it is synced; if not, the caller syncs it, with others.
    pub(crate) synced: bool,
}

impl Place {
    const NOWHERE: Place = Place {
        iova: Iova(0),
        len: 0,
        span: None,
        bounced: None,
        slot: None,
        segments: Vec::new(),
        synced: true,
    };
}

/// How many places a thread keeps for later mappings.
const SPARE: usize = 1024;

thread_local! {
    #[allow(clippy::vec_box, reason = "a box goes to a mapping and comes back")]
    /// Places for reuse: a mapping allocates nothing, once there are as many as the thread has
    /// mapped at a time.
    static SPARES: RefCell<Vec<Box<Place>>> = const { RefCell::new(Vec::new()) };
}

/// The place of a mapping.
#[derive(Debug)]
pub(crate) struct Placed(Option<Box<Place>>);

impl Placed {
    /// A place that is yet to be filled in.
    pub(crate) fn new() -> Placed {
        let spare = SPARES.try_with(|spares| spares.borrow_mut().pop()).ok().flatten();
        Placed(Some(spare.unwrap_or_else(|| Box::new(Place::NOWHERE))))
    }

    /// Moves the place out, and leaves an empty one.
    pub(crate) fn take(&mut self) -> Placed {
        Placed(self.0.take())
    }
}

impl Deref for Placed {
    type Target = Place;

    #[inline]
    fn deref(&self) -> &Place {
        static NOWHERE: Place = Place::NOWHERE;
        self.0.as_deref().unwrap_or(&NOWHERE)
    }
}

impl DerefMut for Placed {
    #[inline]
    fn deref_mut(&mut self) -> &mut Place {
        self.0.as_deref_mut().expect("the mapping was moved out")
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let Some(mut place) = self.0.take() else { return };
        let Place { iova: _, len: _, span, bounced, slot, segments, synced } = &mut *place;
        (*span, *bounced, *slot) = (None, None, None);
        *synced = true;
        // Keeps the heap memory of the list too.
        segments.clear();
        // Fails on a thread that ends, which needs no spares.
        let _ = SPARES.try_with(|spares| {
            let mut spares = spares.borrow_mut();
            if spares.len() < SPARE {
                spares.push(place);
            }
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_used_again_holds_nothing_of_the_one_before() {
        let mut placed = Placed::new();
        placed.iova = Iova(0x1000);
        placed.len = 10;
        placed.synced = false;
        for n in 0..100 {
            placed.segments.push(Segment { addr: n, len: 1 });
        }
        let first = core::ptr::from_ref(&*placed);
        let moved = placed.take();
        assert_eq!((placed.len, moved.len, core::ptr::from_ref(&*moved)), (0, 10, first));
        drop(placed);
        drop(moved);
        let next = Placed::new();
        assert_eq!(core::ptr::from_ref(&*next), first, "it was kept");
        assert!(next.segments.is_empty() && next.synced && next.span.is_none());
    }

    #[test]
    fn no_more_than_some_are_kept() {
        let many: Vec<Placed> = (0..2 * SPARE).map(|_| Placed::new()).collect();
        drop(many);
        assert_eq!(SPARES.with(|spares| spares.borrow().len()), SPARE);
    }
}
