//! Counting pages up, and holding those that are not held yet: the one path.

use ringfence_iommu::{HostAddr, Iova, Prot};

use super::Pinner;
use crate::pin::{
    Backing, HoldError, PinError, Run,
    pages::{PageHold, Rights},
    slots::SlotPages,
};

/// Most runs gathered before they are held: more would not make the calls cheaper.
const BATCH: usize = 64;

/// Runs that are to be held.
pub(super) struct Batch {
    pub(super) runs: Vec<Run>,
    /// Of each run: its window, its first page there, how many pages.
    pub(super) places: Vec<(usize, usize, usize)>,
    pub(super) rights: Rights,
    /// Bytes of all runs.
    pub(super) bytes: u64,
}

impl Batch {
    pub(super) fn new() -> Batch {
        Batch {
            runs: Vec::with_capacity(BATCH),
            places: Vec::with_capacity(BATCH),
            rights: Rights { prot: Prot::empty(), exceed: false },
            bytes: 0,
        }
    }

    fn clear(&mut self) {
        self.runs.clear();
        self.places.clear();
        self.bytes = 0;
    }
}

impl<B: Backing> Pinner<B> {
    #[inline(always)]
    pub(super) fn pin_each<I>(&mut self, iovas: I, prot: Prot) -> Result<(), PinError>
    where
        I: Iterator<Item = Iova> + Clone,
    {
        let mut counted = 0;
        let result = self.count_up(iovas.clone(), prot, &mut counted);
        let result = result.and_then(|()| self.hold(prot));
        if result.is_err() {
            self.undo(iovas.take(counted));
        }
        result
    }

    /// Counts pages up, and holds those that are not held yet: all but the last batch of them.
    #[inline(always)]
    fn count_up<I>(&mut self, iovas: I, prot: Prot, counted: &mut usize) -> Result<(), PinError>
    where
        I: Iterator<Item = Iova>,
    {
        for iova in iovas {
            let (at, n) = self.find(iova)?;
            let window = &mut self.windows[at];
            let Rights { prot: allowed, .. } = window.rights;
            if !allowed.allows(prot) {
                return Err(PinError::Denied { iova, requested: prot, allowed });
            }
            let host = window.host(iova.0 - window.range.first().0);
            let page = &mut window.pages[n];
            page.count = page.count.checked_add(1).ok_or(PinError::Count(iova))?;
            *counted += 1;
            window.pinned += u64::from(page.count == 1);
            match page.place() {
                PageHold::Nowhere if self.backing.is_special(host) => page.put(PageHold::Special),
                PageHold::Nowhere => {
                    page.put(PageHold::Pending);
                    self.add(at, n, host, prot)?;
                    continue;
                }
                PageHold::Slot(slot) if page.count == 1 => self.slots.held(slot).live += 1,
                _ => {}
            }
            if prot.contains(Prot::WRITE) {
                window.mark(n, 1);
            }
        }
        Ok(())
    }

    /// Adds a page to the batch: to its last run, if it continues that.
    #[inline(always)]
    fn add(&mut self, window: usize, n: usize, addr: HostAddr, prot: Prot) -> Result<(), PinError> {
        let batch = &mut self.batch;
        let len = self.limits.page;
        if let (Some(run), Some(place)) = (batch.runs.last_mut(), batch.places.last_mut())
            && place.0 == window
            && place.1 + place.2 == n
            && run.len < self.limits.run
        {
            run.len += len;
            place.2 += 1;
            batch.bytes += len;
            return Ok(());
        }
        let rights = self.windows[window].rights;
        if !batch.runs.is_empty() && (batch.runs.len() == BATCH || batch.rights != rights) {
            self.hold_now(prot)?;
        }
        let batch = &mut self.batch;
        batch.rights = rights;
        batch.runs.push(Run { addr, len });
        batch.places.push((window, n, 1));
        batch.bytes += len;
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn hold_now(&mut self, prot: Prot) -> Result<(), PinError> {
        self.hold(prot)
    }

    /// Charges the batch, and holds it. If that fails, pages that are not held are not charged, and
    /// the batch is empty in any case.
    #[inline(always)]
    fn hold(&mut self, prot: Prot) -> Result<(), PinError> {
        if self.batch.runs.is_empty() {
            return Ok(());
        }
        let mut left = self.batch.bytes;
        let mut result = self.account.charge(left, self.batch.rights.exceed).map_err(Into::into);
        let mut at = 0;
        while result.is_ok() && at < self.batch.runs.len() {
            match self.hold_some(at, prot) {
                Ok((next, bytes)) => {
                    at = next;
                    left -= bytes;
                }
                Err(error) => {
                    self.account.uncharge(left);
                    result = Err(error);
                }
            }
        }
        self.batch.clear();
        result
    }

    /// Holds runs of the batch from `at` on, as many as one call can; returns where to continue,
    /// and how many bytes are held.
    #[inline(always)]
    fn hold_some(&mut self, at: usize, prot: Prot) -> Result<(usize, u64), PinError> {
        let batch = &mut self.batch;
        let want = (batch.runs.len() - at).min(self.limits.runs);
        let taken = self.slots.take(want);
        let (slot, many) = taken.ok_or(PinError::Slots(self.limits.slots))?;
        let runs = &mut batch.runs[at..at + many];
        let held = match self.backing.hold(slot, runs, batch.rights.prot) {
            Ok(held) => held,
            Err(error) => {
                self.slots.give(slot, many);
                return Err(self.failed(at, error));
            }
        };
        if held < many {
            self.slots.give(slot + held as u32, many - held);
        }
        let mut bytes = 0;
        let mut done = 0;
        for n in 0..held {
            let run = batch.runs[at + n];
            let (window, first, _) = batch.places[at + n];
            let window = &mut self.windows[window];
            done = (run.len >> self.shift) as usize;
            bytes += run.len;
            let (slot, pages) = (slot + n as u32, done as u32);
            *self.slots.held(slot) = SlotPages { first, pages, live: pages };
            let place = PageHold::Slot(slot);
            window.pages[first..first + done].iter_mut().for_each(|page| page.put(place));
            if prot.contains(Prot::WRITE) {
                window.mark(first, done);
            }
        }
        self.held += bytes;
        // If the last run was cut short, the rest of it comes next.
        let last = at + held - 1;
        let (_, first, pages) = &mut batch.places[last];
        if done == *pages {
            return Ok((at + held, bytes));
        }
        *first += done;
        *pages -= done;
        let run = &mut batch.runs[last];
        run.addr = HostAddr(run.addr.0 + run.len);
        run.len = (*pages as u64) << self.shift;
        Ok((last, bytes))
    }

    /// The error for a failure to hold the run `at` of the batch.
    #[cold]
    fn failed(&self, at: usize, error: HoldError) -> PinError {
        let HoldError { addr, errno } = error;
        let (window, ..) = self.batch.places[at];
        let window = &self.windows[window];
        let offset = addr.0.saturating_sub(window.addr.0).min(window.range.extent());
        PinError::Hold { iova: window.iova(offset), addr, errno }
    }

    /// Takes back what a pin that failed has counted up and held.
    #[cold]
    #[inline(never)]
    fn undo<I>(&mut self, iovas: I)
    where
        I: Iterator<Item = Iova> + Clone,
    {
        self.batch.clear();
        let undone = self.unpin_each(iovas);
        debug_assert_eq!(undone, Ok(()));
    }
}
