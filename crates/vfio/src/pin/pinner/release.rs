//! Counting pages down, and releasing those that are not pinned any more.

use ringfence_iommu::Iova;

use super::Pinner;
use crate::pin::{Backing, PinError, Release, pages::PageHold, slots::SlotPages};

/// Most slots gathered before they are released: more would not make the calls cheaper.
const BATCH: usize = 64;

/// What is to be released.
pub(super) struct Gone {
    pub(super) slots: Vec<u32>,
    /// Bytes of all slots.
    pub(super) bytes: u64,
}

impl Gone {
    pub(super) fn new() -> Gone {
        Gone { slots: Vec::with_capacity(BATCH), bytes: 0 }
    }
}

impl<B: Backing> Pinner<B> {
    #[inline(always)]
    pub(super) fn unpin_each<I>(&mut self, iovas: I) -> Result<(), PinError>
    where
        I: Iterator<Item = Iova> + Clone,
    {
        // Checks that all pages are pinned before any is released.
        for (counted, iova) in iovas.clone().enumerate() {
            if let Err(error) = self.count_down(iova) {
                self.count_again(iovas.take(counted));
                return Err(error);
            }
        }
        for iova in iovas {
            self.give_up(iova);
        }
        self.release();
        Ok(())
    }

    #[inline(always)]
    fn count_down(&mut self, iova: Iova) -> Result<(), PinError> {
        let (at, n) = self.find(iova)?;
        let window = &mut self.windows[at];
        let page = &mut window.pages[n];
        page.count = page.count.checked_sub(1).ok_or(PinError::NotPinned(iova))?;
        if page.count == 0 {
            window.pinned -= 1;
            if let PageHold::Slot(slot) = page.place() {
                self.slots.held(slot).live -= 1;
            }
        }
        Ok(())
    }

    /// Takes back what was counted down.
    #[cold]
    #[inline(never)]
    fn count_again(&mut self, iovas: impl Iterator<Item = Iova>) {
        for iova in iovas {
            let Ok((at, n)) = self.find(iova) else { continue };
            let window = &mut self.windows[at];
            let page = &mut window.pages[n];
            page.count += 1;
            if page.count == 1 {
                window.pinned += 1;
                if let PageHold::Slot(slot) = page.place() {
                    self.slots.held(slot).live += 1;
                }
            }
        }
    }

    /// Notes what to release, now that the page at `iova` has been counted down.
    #[inline(always)]
    fn give_up(&mut self, iova: Iova) {
        let Ok((at, n)) = self.find(iova) else { return };
        let window = &mut self.windows[at];
        let page = &mut window.pages[n];
        if page.count != 0 {
            return;
        }
        match page.place() {
            PageHold::Nowhere => {}
            PageHold::Pending | PageHold::Special => page.put(PageHold::Nowhere),
            PageHold::Slot(slot) => {
                let SlotPages { first, pages, live } = *self.slots.held(slot);
                if live != 0 {
                    return;
                }
                let pages = &mut window.pages[first..first + pages as usize];
                pages.iter_mut().for_each(|page| page.put(PageHold::Nowhere));
                let bytes = (pages.len() as u64) << self.shift;
                if self.gone.slots.len() == BATCH {
                    self.release_now();
                }
                self.gone.slots.push(slot);
                self.gone.bytes += bytes;
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn release_now(&mut self) {
        self.release();
    }

    /// Releases what was noted, and uncharges it.
    #[inline(always)]
    fn release(&mut self) {
        let gone = &mut self.gone;
        if gone.slots.is_empty() {
            return;
        }
        if gone.slots.len() > 1 && !gone.slots.is_sorted() {
            gone.slots.sort_unstable();
        }
        let mut rest = gone.slots.as_slice();
        while let Some(&first) = rest.first() {
            // Adjacent slots go in one call.
            let leads_on = |two: &&[u32]| two[0] + 1 == two[1] && !two[1].is_multiple_of(64);
            let many = 1 + rest.windows(2).take_while(leads_on).count();
            let many = many.min(self.limits.runs);
            self.backing.release(Release::Slots(first..first + many as u32));
            self.slots.give(first, many);
            rest = &rest[many..];
        }
        gone.slots.clear();
        self.account.uncharge(gone.bytes);
        self.held -= gone.bytes;
        gone.bytes = 0;
    }
}
