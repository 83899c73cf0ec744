//! Where the bytes of packets lie in this process, and how they are copied from one driver's memory
//! to another's in one go.

use std::{ptr::NonNull, sync::atomic::Ordering};

use ringfence_iotlb::View;
use ringfence_mem::{Access, AccessError, HostSlice, Physical, Translate};
use ringfence_virtq::Desc;

/// Memory with pieces that may be kept for a while, so that those of a whole burst are looked up
/// before the first is touched.
///
/// # Safety
/// A piece that [`Translate::slices`] gives stays mapped, without a Rust reference to it, for as
/// long as `self` is borrowed.
pub(super) unsafe trait Lasting: Translate {
    /// Whether all that was read is what the driver has, and not in place of memory that is lost.
    ///
    /// # Errors
    /// Some is lost.
    fn intact(&self) -> Result<(), AccessError>;

    /// Notes all misses of an access, so that they are sent together. True if nothing is missing.
    fn prefetch(&self, addr: u64, len: u64, access: Access) -> bool;

    /// Counts the updates and refusals for misses.
    fn updates(&self) -> u64;

    /// Counts an access that timed out.
    fn gave_up(&self);

    /// Counts how often the endpoint was rebound.
    fn bindings(&self) -> u64;

    /// Runs `job` without reporting its faults.
    fn silently<R>(&self, job: impl FnOnce() -> R) -> R;

    /// A piece of memory around `addr`, and its first address; `None` if there is none now. Reports
    /// no faults: the access itself does.
    fn around(&self, addr: u64, access: Access) -> Option<(u64, HostSlice<'_>)>;
}

// SAFETY: a view's pieces lie in the memory that it holds, which only `set_memory` replaces, and
// that takes the view by a unique borrow.
unsafe impl Lasting for View {
    #[inline]
    fn intact(&self) -> Result<(), AccessError> {
        self.check()
    }

    fn prefetch(&self, addr: u64, len: u64, access: Access) -> bool {
        View::prefetch(self, addr, len, access)
    }

    fn updates(&self) -> u64 {
        View::updates_seen(self)
    }

    fn gave_up(&self) {
        if let Some(iotlb) = self.iotlb() {
            iotlb.stats().timeouts.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn bindings(&self) -> u64 {
        View::bindings(self)
    }

    fn silently<R>(&self, job: impl FnOnce() -> R) -> R {
        View::silently(self, job)
    }

    #[inline]
    fn around(&self, addr: u64, access: Access) -> Option<(u64, HostSlice<'_>)> {
        View::around(self, addr, access)
    }
}

/// Finds packets of one direction that lie in one piece. Most lie near the previous one, so the
/// memory found for that is tried first. So a burst in memory that is mapped in one piece costs one
/// lookup, whether it is behind an IOMMU or not.
pub(super) struct Runs<'b, B> {
    bus: &'b B,
    access: Access,
    /// What was found last, and its first address.
    run: Option<HostSlice<'b>>,
    first: u64,
}

impl<B> Copy for Runs<'_, B> {}

impl<B> Clone for Runs<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<'b, B: Lasting> Runs<'b, B> {
    #[inline]
    pub(super) fn new(bus: &'b B, access: Access) -> Runs<'b, B> {
        Runs { bus, access, run: None, first: 0 }
    }

    /// The `len` bytes at `addr`, if they lie in one piece; `None` if they do not, if `len` is 0,
    /// or if their translation is missing.
    #[inline(always)]
    pub(super) fn piece(&mut self, addr: u64, len: u32) -> Option<HostSlice<'b>> {
        if let Some(piece) = self.known(addr, len) {
            return Some(piece);
        }
        self.look(addr)?;
        self.known(addr, len)
    }

    #[inline(never)]
    fn look(&mut self, addr: u64) -> Option<()> {
        let (first, run) = self.bus.around(addr, self.access)?;
        (self.first, self.run) = (first, Some(run));
        Some(())
    }

    #[inline(always)]
    fn known(&self, addr: u64, len: u32) -> Option<HostSlice<'b>> {
        let run = self.run?;
        let (offset, len) = (addr.wrapping_sub(self.first), u64::from(len));
        let room = run.len() as u64;
        let inside = len != 0 && offset < room && len <= room - offset;
        inside.then(|| run.part(offset as usize, len as usize))
    }
}

// SAFETY: its pieces lie in the memory that it holds, which only `set_memory` replaces, and that
// takes it by a unique borrow.
unsafe impl Lasting for Physical {
    #[inline]
    fn intact(&self) -> Result<(), AccessError> {
        self.check()
    }

    fn prefetch(&self, _: u64, _: u64, _: Access) -> bool {
        true
    }

    fn updates(&self) -> u64 {
        0
    }

    fn gave_up(&self) {}

    fn bindings(&self) -> u64 {
        0
    }

    fn silently<R>(&self, job: impl FnOnce() -> R) -> R {
        job()
    }

    #[inline]
    fn around(&self, addr: u64, access: Access) -> Option<(u64, HostSlice<'_>)> {
        // So that lost memory is refused.
        self.slices(addr, 1, access, |_| ()).ok()?;
        Some((addr, self.memory().find_gpa(addr)?.slice))
    }
}

/// Appends the pieces of `desc` to `into`.
///
/// # Errors
/// An address cannot be reached.
pub(super) fn gather<'b, B: Lasting>(
    bus: &'b B,
    desc: Desc,
    access: Access,
    into: &mut Vec<HostSlice<'b>>,
) -> Result<(), AccessError> {
    bus.slices(desc.addr, desc.len.into(), access, |piece| {
        if let Some(base) = NonNull::new(piece.as_ptr()) {
            // SAFETY: mapped while `bus` is borrowed, and without references (`Lasting`).
            into.push(unsafe { HostSlice::new(base, piece.len()) });
        }
    })
}

/// Marks pieces that were written, if that is logged.
#[inline]
pub(super) fn mark<'p>(bus: &impl Lasting, pieces: impl Iterator<Item = HostSlice<'p>>) {
    if bus.is_logged() {
        pieces.for_each(|piece| bus.mark(piece));
    }
}

/// An empty list in the memory of an old one, so that no packet allocates.
pub(super) fn recycle<'new>(mut old: Vec<HostSlice<'_>>) -> Vec<HostSlice<'new>> {
    old.clear();
    // Collected in place.
    old.into_iter().map(|_| unreachable!("it is empty")).collect()
}

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Prefetches memory that is about to be read. A hint to the processor.
#[inline]
pub(super) fn soon(piece: HostSlice<'_>) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect on the program, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(piece.as_ptr().cast()) };
        if piece.len() > LINE {
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(piece.as_ptr().wrapping_add(LINE).cast()) };
        }
    }
    let _ = piece;
}

/// Prefetches memory that is about to be written: it acquires the lines exclusively, which
/// otherwise each store would have to do, one after the other. A hint to the processor.
#[inline]
pub(super) fn soon_written(piece: HostSlice<'_>) {
    ringfence_mem::soon_written(piece.as_ptr());
    if piece.len() > LINE {
        ringfence_mem::soon_written(piece.as_ptr().wrapping_add(LINE));
    }
}

/// Copies as many bytes as both pieces hold; returns how many. They may overlap: two drivers, or
/// the two queues of one, may use one page.
#[inline]
pub(super) fn copy(from: HostSlice<'_>, to: HostSlice<'_>) -> usize {
    let len = from.len().min(to.len());
    // SAFETY: both are mapped for `len` bytes and have no references (contract of
    // `HostSlice::new`), and this copy allows an overlap. Other processes may write meanwhile: the
    // bytes are plain data and any mix of old and new is accepted.
    unsafe { to.as_ptr().copy_from(from.as_ptr(), len) };
    len
}

/// Fills pieces one after the other.
pub(super) struct Writer<'p, 'b> {
    pieces: &'p [HostSlice<'b>],
    /// What the first of `pieces` still takes.
    left: HostSlice<'b>,
}

impl<'p, 'b> Writer<'p, 'b> {
    /// `None` for no pieces.
    pub(super) fn new(pieces: &'p [HostSlice<'b>]) -> Option<Writer<'p, 'b>> {
        let (&left, pieces) = pieces.split_first()?;
        Some(Writer { pieces, left })
    }

    /// Writes `from`; what finds no room is left out.
    pub(super) fn put(&mut self, mut from: HostSlice<'_>) {
        while !from.is_empty() {
            let done = copy(from, self.left);
            from = from.part(done, usize::MAX);
            if !self.advance(done) {
                return;
            }
        }
    }

    /// Writes `bytes`; what finds no room is left out.
    pub(super) fn put_bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let done = self.left.copy_from(bytes);
            bytes = &bytes[done..];
            if !self.advance(done) {
                return;
            }
        }
    }

    /// False at the end.
    fn advance(&mut self, done: usize) -> bool {
        self.left = self.left.part(done, usize::MAX);
        while self.left.is_empty() {
            let Some((&next, rest)) = self.pieces.split_first() else { return false };
            (self.left, self.pieces) = (next, rest);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ringfence_mem::{GuestRam, Memory, Region};

    proptest! {
        #[test]
        fn pieces_of_any_length_are_filled_in_order(
            from in prop::collection::vec(0..40usize, 1..10),
            to in prop::collection::vec(0..40usize, 1..10),
        ) {
            let ram = GuestRam::new(8192, 0).unwrap();
            let bus = Physical::new(Memory::of_ram(&ram).unwrap());
            let bytes: Vec<u8> = (0..400).map(|at| (at * 7 + at / 256) as u8).collect();
            bus.write(0, &bytes).unwrap();
            let lay = |lens: &[usize], mut at: u64| -> Vec<Desc> {
                let place = |&len: &usize| {
                    let desc = Desc::readable(at, len as u32);
                    at += len as u64;
                    desc
                };
                lens.iter().map(place).collect()
            };
            let (mut source, mut target) = (Vec::new(), Vec::new());
            for desc in lay(&from, 0) {
                gather(&bus, desc, Access::Read, &mut source).unwrap();
            }
            for desc in lay(&to, 4096) {
                gather(&bus, desc, Access::Write, &mut target).unwrap();
            }
            if let Some(mut writer) = Writer::new(&target) {
                writer.put_bytes(b"ab");
                source.iter().for_each(|&piece| writer.put(piece));
            }
            let sent = [&b"ab"[..], &bytes[..from.iter().sum()]].concat();
            let room = to.iter().sum::<usize>();
            let mut got = vec![0; 400];
            bus.read(4096, &mut got).unwrap();
            let count = room.min(sent.len());
            prop_assert_eq!(&got[..count], &sent[..count]);
            prop_assert!(got[count..].iter().all(|&byte| byte == 0));
            prop_assert!(recycle(source).is_empty());
        }
    }

    #[test]
    fn a_piece_lies_in_one_region() {
        let region = |gpa, user_addr| Region { gpa, size: 4096, user_addr, mmap_offset: 0 };
        let file = || GuestRam::new(4096, 0).unwrap().fd().try_clone_to_owned().unwrap();
        let last = u64::MAX - 4095;
        let regions = [(0, 0), (4096, 8192), (last, last)];
        let regions = regions.map(|(gpa, user)| (region(gpa, user), file()));
        let physical = Physical::new(Memory::map(regions.into()).unwrap());
        let mut runs = Runs::new(&physical, Access::Write);
        for first in [0, 4096, last, 0] {
            let piece = runs.piece(first + 10, 20).unwrap();
            piece.copy_from(&first.to_be_bytes());
            let mut back = [0; 8];
            physical.read(first + 10, &mut back).unwrap();
            assert_eq!((back, piece.len()), (first.to_be_bytes(), 20));
            assert!(runs.piece(first, 4096).is_some());
            assert!(runs.piece(first + 4095, 1).is_some());
            for (offset, len) in [(4095, 2), (0, 0), (0, 4097), (0, u32::MAX)] {
                assert!(runs.piece(first + offset, len).is_none(), "{offset} {len}");
            }
        }
        assert!(runs.piece(9000, 1).is_none());
        assert!(runs.piece(20, 1).is_some(), "what was found is still known");
    }
}
