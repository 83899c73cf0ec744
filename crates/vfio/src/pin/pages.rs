//! A window, and the state of its pages.

use ringfence_iommu::{HostAddr, Iova, Prot, Range};
use zerocopy::FromZeros;

use crate::DirtyMap;

/// The state of a page. All zero: neither pinned nor held.
#[derive(Clone, Copy, FromZeros)]
pub(super) struct Page {
    /// How often it is pinned.
    pub(super) count: u32,
    /// Where it is held: a slot's number plus one, or one of the constants below.
    place: u32,
}

/// Where a page is held.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PageHold {
    /// Not held.
    Nowhere,
    /// In a slot, together with others.
    Slot(u32),
    /// In the batch that is yet to be held.
    Pending,
    /// Special: it need not be held.
    Special,
}

/// Slot numbers are below these.
const PENDING: u32 = u32::MAX - 1;
const SPECIAL: u32 = u32::MAX;

impl Page {
    #[inline(always)]
    pub(super) fn place(self) -> PageHold {
        match self.place {
            0 => PageHold::Nowhere,
            PENDING => PageHold::Pending,
            SPECIAL => PageHold::Special,
            slot => PageHold::Slot(slot - 1),
        }
    }

    #[inline(always)]
    pub(super) fn put(&mut self, place: PageHold) {
        self.place = match place {
            PageHold::Nowhere => 0,
            PageHold::Pending => PENDING,
            PageHold::Special => SPECIAL,
            PageHold::Slot(slot) => slot + 1,
        };
    }
}

/// The rights with which the pages of a window are held.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Rights {
    pub(super) prot: Prot,
    /// Whether charges may exceed the account's limit: CAP_IPC_LOCK was held when the window was
    /// added.
    pub(super) exceed: bool,
}

/// IOVAs that stand for memory of this process.
pub(super) struct Window {
    pub(super) range: Range,
    pub(super) addr: HostAddr,
    pub(super) rights: Rights,
    /// How many pages are pinned.
    pub(super) pinned: u64,
    pub(super) pages: Box<[Page]>,
    pub(super) dirty: DirtyMap,
}

impl Window {
    /// `None` if there is no memory for the page counts. `range` and `addr` are multiples of
    /// `page`.
    pub(super) fn new(range: Range, addr: HostAddr, rights: Rights, page: u64) -> Option<Window> {
        let pages = usize::try_from((range.extent() / page).checked_add(1)?).ok()?;
        // Memory that is never touched costs nothing.
        let pages = <[Page]>::new_box_zeroed_with_elems(pages).ok()?;
        let dirty = DirtyMap::new(range, page)?;
        Some(Window { range, addr, rights, pinned: 0, pages, dirty })
    }

    /// Marks pages as written to.
    #[inline(always)]
    pub(super) fn mark(&mut self, first: usize, pages: usize) {
        let bit = first % 64;
        if bit + pages <= 64 {
            self.dirty.words_mut()[first / 64] |= (u64::MAX >> (64 - pages)) << bit;
        } else {
            self.mark_many(first as u64, pages as u64);
        }
    }

    fn mark_many(&mut self, first: u64, pages: u64) {
        let page = self.dirty.page();
        let range = Range::from_len(self.iova(first * page), pages * page);
        range.into_iter().for_each(|range| self.dirty.mark(range));
    }

    /// The address of a page `at` bytes into the window.
    #[inline(always)]
    pub(super) fn host(&self, at: u64) -> HostAddr {
        HostAddr(self.addr.0 + at)
    }

    /// The IOVA `at` bytes into the window.
    #[inline(always)]
    pub(super) fn iova(&self, at: u64) -> Iova {
        Iova(self.range.first().0 + at)
    }
}
