//! Pages pinned by IOVA.

use std::sync::Arc;

use ringfence_iommu::{HostAddr, Iova, Prot, Range};

use super::backing::{Backing, HoldError, Limits, Release, Run};
use super::error::PinError;
use super::pages::{Page, Place, Rights, Window};
use super::slots::{Held, Slots};
use crate::{Account, DirtyMap};

/// Runs gathered before they are held, and slots before they are released: more make the calls no
/// cheaper.
const BATCH: usize = 64;

/// Pins pages by IOVA, each as often as it is asked for, and unpins them.
///
/// [`add_window`](Self::add_window) says which IOVAs stand for which memory of this process. What
/// [`pin`](Self::pin) and [`pin_range`](Self::pin_range) have not held yet is charged to the
/// [`Account`], then held, in runs of contiguous pages. Whatever fails, a call that fails leaves all
/// counts, pins and charges as they were before it.
///
/// A backing with slots holds and releases whole runs: a page whose last pin is gone stays held, and
/// charged, until that is so of all pages of its run; [`held`](Self::held) against
/// [`pinned`](Self::pinned) tells how much that is. (To release a run and hold the rest of it again
/// would leave memory unpinned that a device is writing.)
///
/// Dropping it releases everything.
pub struct Pinner<B: Backing> {
    backing: B,
    limits: Limits,
    /// The binary logarithm of the page size.
    shift: u32,
    account: Arc<Account>,
    /// In ascending order.
    windows: Vec<Window>,
    /// The window that was found last.
    recent: usize,
    slots: Option<Slots>,
    batch: Batch,
    gone: Gone,
    /// Bytes held.
    held: u64,
}

/// Runs that are to be held.
struct Batch {
    runs: Vec<Run>,
    /// Of each run: its window, its first page there, how many pages.
    places: Vec<(usize, usize, usize)>,
    rights: Rights,
    /// Bytes of all runs.
    bytes: u64,
}

/// What is to be released.
struct Gone {
    slots: Vec<u32>,
    run: Option<Run>,
    /// Bytes of all slots, and of runs that were released.
    bytes: u64,
}

impl<B: Backing> Pinner<B> {
    /// Pins with `backing`, at the expense of `account`.
    pub fn new(backing: B, account: Arc<Account>) -> Pinner<B> {
        let limits = backing.limits();
        let rights = Rights { prot: Prot::empty(), exceed: false };
        Pinner {
            backing,
            limits,
            shift: limits.page.trailing_zeros(),
            account,
            windows: Vec::new(),
            recent: 0,
            slots: limits.slots.map(Slots::new),
            batch: Batch {
                runs: Vec::with_capacity(BATCH),
                places: Vec::with_capacity(BATCH),
                rights,
                bytes: 0,
            },
            gone: Gone { slots: Vec::with_capacity(BATCH), run: None, bytes: 0 },
            held: 0,
        }
    }

    /// The backing.
    pub fn backing(&self) -> &B {
        &self.backing
    }

    /// The backing, to change what does not touch what it holds.
    pub fn backing_mut(&mut self) -> &mut B {
        &mut self.backing
    }

    /// Whom the pages are charged to.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// The size of a page in bytes.
    pub fn page(&self) -> u64 {
        self.limits.page
    }

    /// How many pages are pinned.
    pub fn pinned(&self) -> u64 {
        self.windows.iter().map(|window| window.pinned).sum()
    }

    /// How many pages are held and charged: those that are pinned and not special, and those that
    /// are in a run with one.
    pub fn held(&self) -> u64 {
        self.held >> self.shift
    }

    /// How often the page at `iova` is pinned.
    pub fn count(&self, iova: Iova) -> u32 {
        let window = self.windows.iter().find(|window| window.range.contains(iova));
        window.map_or(0, |window| {
            let at = (iova.0 - window.range.first().0) >> self.shift;
            window.pages[at as usize].count
        })
    }

    /// The IOVAs of `range` stand for memory at `addr`, which may be accessed as `prot` says. Pages
    /// are held for `prot`, whatever is asked for (and for writing always, where the backing knows
    /// nothing else). Keeping count of them takes about 8 bytes a page, as it is needed.
    ///
    /// Whether CAP_IPC_LOCK is held is looked up now: it lifts the limit of the account for all pins
    /// of this window (rule L53).
    ///
    /// # Errors
    /// Not whole pages, an overlap, or no memory to keep count.
    pub fn add_window(&mut self, range: Range, addr: HostAddr, prot: Prot) -> Result<(), PinError> {
        let page = self.limits.page;
        let misaligned = || PinError::Misaligned(range.first(), range.extent().saturating_add(1));
        if !range.is_aligned(page) || !addr.0.is_multiple_of(page) {
            return Err(misaligned());
        }
        addr.0.checked_add(range.extent()).ok_or_else(misaligned)?;
        let at = self.windows.partition_point(|window| window.range.first() < range.first());
        let near = &self.windows[at.saturating_sub(1)..(at + 1).min(self.windows.len())];
        if near.iter().any(|window| window.range.overlaps(range)) {
            return Err(PinError::Overlap(range));
        }
        let rights = Rights { prot, exceed: self.account.may_exceed() };
        let window = Window::new(range, addr, rights, page).ok_or(PinError::NoMemory(range))?;
        self.windows.insert(at, window);
        Ok(())
    }

    /// Removes the window of exactly `range`.
    ///
    /// # Errors
    /// There is none, or it has pinned pages (rule L62).
    pub fn remove_window(&mut self, range: Range) -> Result<(), PinError> {
        let at = self.windows.iter().position(|window| window.range == range);
        let at = at.ok_or(PinError::NoWindow(range.first()))?;
        match self.windows[at].pinned {
            0 => _ = self.windows.remove(at),
            pages => return Err(PinError::Busy { range, pages }),
        }
        Ok(())
    }

    /// Pins the pages at `iovas`, each as often as it is listed, for what `prot` says.
    ///
    /// # Errors
    /// See [`PinError`].
    #[inline(always)]
    pub fn pin(&mut self, iovas: &[Iova], prot: Prot) -> Result<(), PinError> {
        self.pin_each(iovas.iter().copied(), prot)
    }

    /// Pins the pages of `len` bytes from `iova` for what `prot` says.
    ///
    /// # Errors
    /// See [`PinError`].
    pub fn pin_range(&mut self, iova: Iova, len: u64, prot: Prot) -> Result<(), PinError> {
        let pages = self.pages_of(iova, len)?;
        self.pin_each(pages, prot)
    }

    /// Takes back one pin of each page at `iovas`, as often as it is listed.
    ///
    /// # Errors
    /// One is not pinned that often.
    #[inline(always)]
    pub fn unpin(&mut self, iovas: &[Iova]) -> Result<(), PinError> {
        self.unpin_each(iovas.iter().copied())
    }

    /// Takes back one pin of each page of `len` bytes from `iova`.
    ///
    /// # Errors
    /// One is not pinned.
    pub fn unpin_range(&mut self, iova: Iova, len: u64) -> Result<(), PinError> {
        let pages = self.pages_of(iova, len)?;
        self.unpin_each(pages)
    }

    /// Marks in `map` which pages of `range` may have been written to by whom they were pinned for,
    /// and forgets those that are not pinned any more: what is pinned for writing is dirty as long
    /// as it is pinned (rule L63).
    pub fn read_dirty(&mut self, range: Range, map: &mut DirtyMap) {
        let page = self.limits.page;
        for window in &mut self.windows {
            let Some(part) = window.range.intersection(range) else { continue };
            let first = ((part.first().0 - window.range.first().0) / page) as usize;
            let last = ((part.last().0 - window.range.first().0) / page) as usize;
            for word in first / 64..=last / 64 {
                let mut left = window.dirty.words()[word];
                while left != 0 {
                    let bit = left.trailing_zeros();
                    left &= left - 1;
                    let at = word * 64 + bit as usize;
                    if at < first || at > last {
                        continue;
                    }
                    let iova = window.iova(at as u64 * page);
                    Range::from_len(iova, page).into_iter().for_each(|page| map.mark(page));
                    if window.pages[at].count == 0 {
                        window.dirty.words_mut()[word] &= !(1 << bit);
                    }
                }
            }
        }
    }

    /// The pages of a range.
    fn pages_of(
        &self,
        iova: Iova,
        len: u64,
    ) -> Result<impl Iterator<Item = Iova> + Clone + use<B>, PinError> {
        let page = self.limits.page;
        let range = Range::from_len(iova, len).filter(|range| range.is_aligned(page));
        let range = range.ok_or(PinError::Misaligned(iova, len))?;
        Ok((0..=range.extent() / page).map(move |n| Iova(iova.0 + n * page)))
    }

    #[inline(always)]
    fn pin_each<I>(&mut self, iovas: I, prot: Prot) -> Result<(), PinError>
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

    /// Counts pages up, and holds those that are not held: all but the last batch of them.
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
                return Err(PinError::Denied { iova, asked: prot, allowed });
            }
            let host = window.host(iova.0 - window.range.first().0);
            let page = &mut window.pages[n];
            page.count = page.count.checked_add(1).ok_or(PinError::Count(iova))?;
            *counted += 1;
            window.pinned += u64::from(page.count == 1);
            match page.place() {
                Place::Nowhere if self.backing.is_special(host) => page.put(Place::Special),
                Place::Nowhere => {
                    page.put(Place::Pending);
                    self.add(at, n, host, prot)?;
                    continue;
                }
                Place::Slot(slot) if page.count == 1 => {
                    let slots = self.slots.as_mut().expect("the backing has slots");
                    slots.held(slot).live += 1;
                }
                _ => {}
            }
            if prot.contains(Prot::WRITE) {
                window.mark(n, 1);
            }
        }
        Ok(())
    }

    /// Adds a page to the batch: to its last run, if it leads on from that.
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

    /// Charges the batch, and holds it. If that fails, what is not held is not charged, and the
    /// batch is empty in any case.
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
        self.batch.runs.clear();
        self.batch.places.clear();
        self.batch.bytes = 0;
        result
    }

    /// Holds runs of the batch from `at` on, as many as one call can: where it goes on, and how many
    /// bytes are held.
    #[inline(always)]
    fn hold_some(&mut self, at: usize, prot: Prot) -> Result<(usize, u64), PinError> {
        let batch = &mut self.batch;
        let want = (batch.runs.len() - at).min(self.limits.runs);
        let (slot, many) = match &mut self.slots {
            Some(slots) => slots.take(want).ok_or_else(|| PinError::Slots(slots.len()))?,
            None => (0, want),
        };
        let runs = &mut batch.runs[at..at + many];
        let held = match self.backing.hold(slot, runs, batch.rights.prot) {
            Ok(held) => held,
            Err(error) => {
                if let Some(slots) = &mut self.slots {
                    slots.give(slot, many);
                }
                return Err(self.failed(at, error));
            }
        };
        if let (Some(slots), 1..) = (&mut self.slots, many - held) {
            slots.give(slot + held as u32, many - held);
        }
        let mut bytes = 0;
        let mut done = 0;
        for n in 0..held {
            let run = batch.runs[at + n];
            let (window, first, _) = batch.places[at + n];
            let window = &mut self.windows[window];
            done = (run.len >> self.shift) as usize;
            bytes += run.len;
            let mut place = Place::Lone;
            if let Some(slots) = &mut self.slots {
                let slot = slot + n as u32;
                let pages = done as u32;
                *slots.held(slot) = Held { first, pages, live: pages };
                place = Place::Slot(slot);
            }
            window.pages[first..first + done].iter_mut().for_each(|page| page.put(place));
            if prot.contains(Prot::WRITE) {
                window.mark(first, done);
            }
        }
        self.held += bytes;
        // What the last run was cut short by is the next one.
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

    /// What the failure to hold the run `at` of the batch means.
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
        self.batch.runs.clear();
        self.batch.places.clear();
        self.batch.bytes = 0;
        let undone = self.unpin_each(iovas);
        debug_assert_eq!(undone, Ok(()));
    }

    #[inline(always)]
    fn unpin_each<I>(&mut self, iovas: I) -> Result<(), PinError>
    where
        I: Iterator<Item = Iova> + Clone,
    {
        // Nothing is released before all is known to be pinned.
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
            if let (Place::Slot(slot), Some(slots)) = (page.place(), &mut self.slots) {
                slots.held(slot).live -= 1;
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
                if let (Place::Slot(slot), Some(slots)) = (page.place(), &mut self.slots) {
                    slots.held(slot).live += 1;
                }
            }
        }
    }

    /// Notes what is to be released, now that the page at `iova` has been counted down.
    #[inline(always)]
    fn give_up(&mut self, iova: Iova) {
        let Ok((at, n)) = self.find(iova) else { return };
        let window = &mut self.windows[at];
        let page = &mut window.pages[n];
        if page.count != 0 {
            return;
        }
        match page.place() {
            Place::Nowhere => {}
            Place::Pending | Place::Special => page.put(Place::Nowhere),
            Place::Lone => {
                page.put(Place::Nowhere);
                let addr = window.host(iova.0 - window.range.first().0);
                let len = self.limits.page;
                match &mut self.gone.run {
                    Some(run) if run.addr.0.checked_add(run.len) == Some(addr.0) => run.len += len,
                    _ => {
                        self.release_run();
                        self.gone.run = Some(Run { addr, len });
                    }
                }
            }
            Place::Slot(slot) => {
                let slots = self.slots.as_mut().expect("the backing has slots");
                let Held { first, pages, live } = *slots.held(slot);
                if live != 0 {
                    return;
                }
                let pages = &mut window.pages[first..first + pages as usize];
                pages.iter_mut().for_each(|page| page.put(Place::Nowhere));
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

    /// Releases what is noted, and takes it off the account.
    #[inline(always)]
    fn release(&mut self) {
        self.release_run();
        let gone = &mut self.gone;
        if let Some(slots) = &mut self.slots
            && !gone.slots.is_empty()
        {
            if gone.slots.len() > 1 && !gone.slots.is_sorted() {
                gone.slots.sort_unstable();
            }
            let mut rest = gone.slots.as_slice();
            while let Some(&first) = rest.first() {
                // Slots side by side go in one call.
                let leads_on = |two: &&[u32]| two[0] + 1 == two[1] && !two[1].is_multiple_of(64);
                let many = 1 + rest.windows(2).take_while(leads_on).count();
                let many = many.min(self.limits.runs);
                self.backing.release(Release::Slots(first..first + many as u32));
                slots.give(first, many);
                rest = &rest[many..];
            }
            gone.slots.clear();
        }
        if gone.bytes != 0 {
            self.account.uncharge(gone.bytes);
            self.held -= gone.bytes;
            gone.bytes = 0;
        }
    }

    #[inline(always)]
    fn release_run(&mut self) {
        if let Some(run) = self.gone.run.take() {
            self.backing.release(Release::Pages(run));
            self.gone.bytes += run.len;
        }
    }

    /// The window of `iova`, and the page in it.
    #[inline(always)]
    fn find(&mut self, iova: Iova) -> Result<(usize, usize), PinError> {
        if !self.windows.get(self.recent).is_some_and(|window| window.range.contains(iova)) {
            self.recent = self.search(iova)?;
        }
        let at = iova.0 - self.windows[self.recent].range.first().0;
        if at & (self.limits.page - 1) != 0 {
            return Err(PinError::Misaligned(iova, self.limits.page));
        }
        Ok((self.recent, (at >> self.shift) as usize))
    }

    #[inline(never)]
    fn search(&self, iova: Iova) -> Result<usize, PinError> {
        let after = self.windows.partition_point(|window| window.range.first() <= iova);
        let at = after.checked_sub(1).filter(|&at| self.windows[at].range.contains(iova));
        at.ok_or(PinError::NoWindow(iova))
    }
}

impl<B: Backing> Drop for Pinner<B> {
    fn drop(&mut self) {
        self.backing.release(Release::All);
        self.account.uncharge(self.held);
    }
}

/// A page is two counters, and stays so: there is one for each page of a window.
const _: () = assert!(size_of::<Page>() == 8);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pin::Fake;

    fn pinner(slots: Option<u32>) -> Pinner<Fake> {
        let mut pinner =
            Pinner::new(Fake::with_slots(slots), Arc::new(Account::with_limit("test", 1 << 30)));
        pinner.add_window(range(16, 512), HostAddr(1 << 32), Prot::RW).unwrap();
        pinner
    }

    fn page(n: u64) -> Iova {
        Iova(n * 4096)
    }

    fn range(first: u64, pages: u64) -> Range {
        Range::from_len(page(first), pages * 4096).unwrap()
    }

    // rule L52
    #[test]
    fn a_run_is_one_call_and_ends_at_what_is_special_or_pinned() {
        let mut pinner = pinner(Some(64));
        pinner.pin_range(page(16), 512 * 4096, Prot::READ).unwrap();
        assert_eq!((pinner.backing().calls(), pinner.backing().slots()), (1, 1));
        pinner.unpin_range(page(16), 512 * 4096).unwrap();
        assert_eq!(pinner.backing().calls(), 2);
        pinner.backing_mut().make_special(HostAddr((1 << 32) + 10 * 4096));
        pinner.pin(&[page(40)], Prot::READ).unwrap();
        pinner.pin_range(page(16), 512 * 4096, Prot::READ).unwrap();
        assert_eq!((pinner.backing().calls(), pinner.backing().slots()), (4, 4));
        assert_eq!((pinner.pinned(), pinner.held()), (512, 511));
    }

    // rule L54
    #[test]
    fn a_page_at_two_iovas_is_charged_twice_and_a_special_one_never() {
        let mut pinner = pinner(None);
        pinner.add_window(range(1000, 512), HostAddr(1 << 32), Prot::RW).unwrap();
        pinner.backing_mut().make_special(HostAddr(1 << 32));
        pinner.pin(&[page(17), page(1001), page(1001)], Prot::READ).unwrap();
        assert_eq!(pinner.account().used(), 2 * 4096);
        pinner.pin(&[page(16), page(1000)], Prot::READ).unwrap();
        assert_eq!((pinner.account().used(), pinner.pinned()), (2 * 4096, 4));
        pinner.unpin(&[page(17), page(16)]).unwrap();
        assert_eq!(pinner.account().used(), 4096);
    }

    // rule L62
    #[test]
    fn what_cannot_be_pinned_is_said_and_changes_nothing() {
        let mut pinner = pinner(Some(8));
        pinner.add_window(range(1000, 512), HostAddr(1 << 33), Prot::READ).unwrap();
        let rw = Prot::RW;
        let denied = PinError::Denied { iova: page(1000), asked: rw, allowed: Prot::READ };
        assert_eq!(pinner.pin(&[page(20), page(1000)], rw), Err(denied));
        assert_eq!(pinner.pin(&[page(20), page(900)], rw), Err(PinError::NoWindow(page(900))));
        let odd = Iova(page(21).0 + 1);
        assert_eq!(pinner.pin(&[page(20), odd], rw), Err(PinError::Misaligned(odd, 4096)));
        assert_eq!(pinner.unpin(&[page(20)]), Err(PinError::NotPinned(page(20))));
        assert_eq!((pinner.pinned(), pinner.held(), pinner.account().used()), (0, 0, 0));
        pinner.windows[0].pages[1].count = u32::MAX;
        assert_eq!(pinner.pin(&[page(18), page(17)], rw), Err(PinError::Count(page(17))));
        pinner.windows[0].pages[1].count = 0;
        assert_eq!((pinner.pinned(), pinner.held()), (0, 0));
        pinner.pin(&[page(1000), page(1001)], Prot::READ).unwrap();
        let busy = PinError::Busy { range: range(1000, 512), pages: 2 };
        assert_eq!(pinner.remove_window(range(1000, 512)), Err(busy));
        assert!(pinner.remove_window(range(1000, 511)).is_err());
        pinner.unpin_range(page(1000), 8192).unwrap();
        pinner.remove_window(range(1000, 512)).unwrap();
    }

    // rule L63
    #[test]
    fn what_is_pinned_for_writing_stays_dirty() {
        let mut pinner = pinner(None);
        pinner.pin_range(page(16), 200 * 4096, Prot::WRITE).unwrap();
        pinner.pin_range(page(300), 4096, Prot::READ).unwrap();
        pinner.unpin(&[page(20)]).unwrap();
        let mut read = |count| {
            let mut map = DirtyMap::new(range(16, 512), 4096).unwrap();
            pinner.read_dirty(range(17, 511), &mut map);
            assert_eq!(map.count(), count);
            assert!(!map.is_dirty(page(16)), "it was not asked for");
        };
        read(199);
        read(198);
        pinner.unpin(&[page(21)]).unwrap();
        let mut map = DirtyMap::new(range(16, 512), 4096).unwrap();
        pinner.read_dirty(Range::ALL, &mut map);
        assert_eq!(map.count(), 199);
        pinner.read_dirty(Range::ALL, &mut map);
        map.clear();
        pinner.read_dirty(Range::ALL, &mut map);
        assert_eq!(map.count(), 198);
    }

    #[test]
    fn windows_that_cannot_be() {
        let mut pinner = pinner(None);
        let mut add = |range, addr| pinner.add_window(range, HostAddr(addr), Prot::RW);
        for taken in [range(0, 17), range(527, 1), range(17, 2), range(0, 1000)] {
            assert_eq!(add(taken, 0), Err(PinError::Overlap(taken)));
        }
        assert!(matches!(add(range(0, 1), 1), Err(PinError::Misaligned(..))));
        assert!(matches!(add(range(0, 2), u64::MAX - 4095), Err(PinError::Misaligned(..))));
        let high = Range::new(Iova(1 << 32), Iova(u64::MAX)).unwrap();
        assert_eq!(add(high, 0), Err(PinError::NoMemory(high)));
        add(range(0, 16), u64::MAX - 0xffff).unwrap();
        add(range((1 << 52) - 1, 1), 0).unwrap();
        pinner.pin(&[page((1 << 52) - 1), page(15), page(16)], Prot::RW).unwrap();
        assert_eq!(pinner.pinned(), 3);
    }
}
