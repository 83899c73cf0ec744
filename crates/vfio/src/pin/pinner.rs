//! Pages pinned by IOVA.

mod hold;
mod release;

use std::sync::Arc;

use ringfence_iommu::{HostAddr, Iova, Prot, Range};

use self::hold::Batch;
use self::release::Gone;
use super::backing::{Backing, Limits, Release};
use super::error::PinError;
use super::pages::{Page, Rights, Window};
use super::slots::Slots;
use crate::{Account, DirtyMap};

/// Pins pages by IOVA, counting the pins of each, and unpins them.
///
/// [`add_window`](Self::add_window) says which IOVAs stand for which memory of this process.
/// [`pin`](Self::pin) and [`pin_range`](Self::pin_range) charge the pages that are not held yet to
/// the [`Account`], then hold them, in runs of contiguous pages. A call that fails, for whatever
/// reason, leaves all counts, pins and charges as they were before it.
///
/// Runs are held and released as a whole: a page whose last pin is gone stays held,
/// and charged, until no page of its run is pinned; compare [`held`](Self::held) with
/// [`pinned`](Self::pinned). (Releasing a run and holding the rest of it again would leave memory
/// unpinned that a device is writing.)
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
    slots: Slots,
    batch: Batch,
    gone: Gone,
    /// Bytes held.
    held: u64,
}

impl<B: Backing> Pinner<B> {
    /// Pins with `backing`, and charges `account`.
    pub fn new(backing: B, account: Arc<Account>) -> Pinner<B> {
        let limits = backing.limits();
        Pinner {
            backing,
            limits,
            shift: limits.page.trailing_zeros(),
            account,
            windows: Vec::new(),
            recent: 0,
            slots: Slots::new(limits.slots, limits.first),
            batch: Batch::new(),
            gone: Gone::new(),
            held: 0,
        }
    }

    /// The backing.
    pub fn backing(&self) -> &B {
        &self.backing
    }

    /// The backing; do not change what it holds through this.
    pub fn backing_mut(&mut self) -> &mut B {
        &mut self.backing
    }

    /// The account that the pages are charged to.
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
    /// share a run with such a page.
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

    /// Makes the IOVAs of `range` stand for memory at `addr`, which may be accessed as `prot` says.
    /// Pages are held for `prot`, whatever access a pin requests (and always for writing, where the
    /// backing cannot do otherwise). The counts take about 8 bytes for each page that is used.
    ///
    /// Whether CAP_IPC_LOCK is held is looked up now: it lifts the limit of the account for all
    /// pins of this window (rule [L53]).
    ///
    /// # Errors
    /// Not whole pages, an overlap, or no memory for the counts.
    ///
    /// [L53]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l53
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
    /// There is no such window, or it has pinned pages (rule [L62]).
    ///
    /// [L62]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l62
    pub fn remove_window(&mut self, range: Range) -> Result<(), PinError> {
        let at = self.windows.iter().position(|window| window.range == range);
        let at = at.ok_or(PinError::NoWindow(range.first()))?;
        match self.windows[at].pinned {
            0 => _ = self.windows.remove(at),
            pages => return Err(PinError::Busy { range, pages }),
        }
        Ok(())
    }

    /// Pins the pages at `iovas`, each as often as it is listed, for access as `prot` says.
    ///
    /// All of it is inlined, down to the system call: the CPU may have lost its return predictions
    /// in the kernel, and then the first return after the call costs a quarter as much as the call.
    ///
    /// # Errors
    /// See [`PinError`].
    #[inline(always)]
    pub fn pin(&mut self, iovas: &[Iova], prot: Prot) -> Result<(), PinError> {
        self.pin_each(iovas.iter().copied(), prot)
    }

    /// Pins the pages of `len` bytes from `iova` for access as `prot` says.
    ///
    /// # Errors
    /// See [`PinError`].
    pub fn pin_range(&mut self, iova: Iova, len: u64, prot: Prot) -> Result<(), PinError> {
        let pages = self.pages_of(iova, len)?;
        self.pin_each(pages, prot)
    }

    /// Takes back one pin of each page at `iovas`, for each time that it is listed.
    ///
    /// # Errors
    /// A page is not pinned that often.
    #[inline(always)]
    pub fn unpin(&mut self, iovas: &[Iova]) -> Result<(), PinError> {
        self.unpin_each(iovas.iter().copied())
    }

    /// Takes back one pin of each page of `len` bytes from `iova`.
    ///
    /// # Errors
    /// A page is not pinned.
    pub fn unpin_range(&mut self, iova: Iova, len: u64) -> Result<(), PinError> {
        let pages = self.pages_of(iova, len)?;
        self.unpin_each(pages)
    }

    /// Marks in `map` which pages of `range` the users of the pins may have written, and forgets
    /// those that are not pinned any more: a page that is pinned for writing is dirty as long as it
    /// is pinned (rule [L63]).
    ///
    /// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
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

/// A page is two counters and must not grow: a window has one for each of its pages.
const _: () = assert!(size_of::<Page>() == 8);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pin::fake::Fake;

    fn pinner(slots: u32) -> Pinner<Fake> {
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
        let mut pinner = pinner(64);
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
        let mut pinner = pinner(64);
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
    fn what_cannot_be_pinned_is_an_error_and_changes_nothing() {
        let mut pinner = pinner(8);
        pinner.add_window(range(1000, 512), HostAddr(1 << 33), Prot::READ).unwrap();
        let rw = Prot::RW;
        let denied = PinError::Denied { iova: page(1000), requested: rw, allowed: Prot::READ };
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
        let mut pinner = pinner(64);
        pinner.pin_range(page(16), 200 * 4096, Prot::WRITE).unwrap();
        pinner.pin_range(page(300), 4096, Prot::READ).unwrap();
        pinner.unpin(&[page(20)]).unwrap();
        let mut read = |count| {
            let mut map = DirtyMap::new(range(16, 512), 4096).unwrap();
            pinner.read_dirty(range(17, 511), &mut map);
            assert_eq!(map.count(), count);
            assert!(!map.is_dirty(page(16)), "it was not requested");
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
        let mut pinner = pinner(64);
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
