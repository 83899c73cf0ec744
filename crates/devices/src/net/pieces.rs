//! Where the bytes of packets lie in this process, and how they are copied from one driver's memory
//! to another's in one go.

use std::{cell::Cell, ptr::NonNull, sync::atomic::Ordering};

use ringfence_iotlb::View;
use ringfence_mem::{Access, AccessError, HostSlice, Physical, Translate, Window};
use ringfence_virtq::Desc;

/// Memory whose pieces may be kept for a while, so that those of a whole burst are looked up before
/// the first is touched.
///
/// # Safety
/// A piece that [`Translate::slices`] gives stays mapped, without a Rust reference to it, for as
/// long as `self` is borrowed.
pub(super) unsafe trait Lasting: Translate {
    /// Notes all that an access lacks, so that it is asked for at once. True if it lacks nothing.
    fn prefetch(&self, addr: u64, len: u64, access: Access) -> bool;

    /// Counts the answers to what was asked for.
    fn answers(&self) -> u64;

    /// Counts an access that gave up waiting.
    fn gave_up(&self);

    /// The `len` bytes at `addr`, if they lie in one piece; `None` if they do not, or are not to be
    /// had now. Reports no faults: the access itself will.
    fn piece(&self, addr: u64, len: u64, access: Access) -> Option<HostSlice<'_>>;
}

// SAFETY: a view's pieces lie in the memory that it holds, which only `set_memory` replaces, and
// that takes the view by a unique borrow.
unsafe impl Lasting for View {
    fn prefetch(&self, addr: u64, len: u64, access: Access) -> bool {
        View::prefetch(self, addr, len, access)
    }

    fn answers(&self) -> u64 {
        View::answers(self)
    }

    fn gave_up(&self) {
        if let Some(iotlb) = self.iotlb() {
            iotlb.stats().timeouts.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn piece(&self, addr: u64, len: u64, access: Access) -> Option<HostSlice<'_>> {
        let found: Cell<Option<(*mut u8, usize)>> = Cell::new(None);
        self.silently(|| {
            self.slices(addr, len, access, |piece| found.set(Some((piece.as_ptr(), piece.len()))))
        })
        .ok()?;
        // The last of several pieces is shorter.
        let (base, found) = found.get().filter(|&(_, found)| found as u64 == len)?;
        // SAFETY: mapped while `self` is borrowed, and without references (`Lasting`).
        Some(unsafe { HostSlice::new(NonNull::new(base)?, found) })
    }
}

/// Memory that is reached by guest-physical address. It remembers where the last region lies, as
/// memory mostly is one.
pub(super) struct Plain<'m> {
    physical: &'m Physical,
    /// Its first address, its length less one, and where it begins in this process.
    region: Cell<(u64, u64, *mut u8)>,
    found: Cell<bool>,
}

impl<'m> Plain<'m> {
    #[inline]
    pub(super) fn new(physical: &'m Physical) -> Plain<'m> {
        let nowhere = (0, 0, std::ptr::null_mut());
        Plain { physical, region: Cell::new(nowhere), found: Cell::new(false) }
    }

    #[cold]
    fn look(&self, addr: u64, len: u64, access: Access) -> Option<()> {
        // So that `check` knows that the region is touched, and what is lost is refused.
        self.physical.slices(addr, len, access, |_| ()).ok()?;
        let memory = self.physical.memory();
        let region = memory.regions().find(|r| addr >= r.gpa && addr - r.gpa < r.size)?;
        let slice = memory.find_gpa(region.gpa)?.slice;
        self.region.set((region.gpa, slice.len() as u64 - 1, slice.as_ptr()));
        self.found.set(true);
        Some(())
    }
}

impl Translate for Plain<'_> {
    #[inline]
    fn slices<F>(&self, addr: u64, len: u64, access: Access, each: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        self.physical.slices(addr, len, access, each)
    }

    fn window(&self, addr: u64, len: u64, access: Access) -> Result<Window, AccessError> {
        self.physical.window(addr, len, access)
    }

    #[inline]
    fn mark(&self, piece: HostSlice<'_>) {
        self.physical.mark(piece);
    }

    #[inline]
    fn is_logged(&self) -> bool {
        self.physical.is_logged()
    }

    #[inline]
    fn check(&self) -> Result<(), AccessError> {
        self.physical.check()?;
        // Rings were found by other addresses, so that it does not know of them.
        self.physical.memory().check()
    }
}

// SAFETY: its pieces lie in the memory that `physical` holds, which is borrowed for longer.
unsafe impl Lasting for Plain<'_> {
    fn prefetch(&self, _: u64, _: u64, _: Access) -> bool {
        true
    }

    fn answers(&self) -> u64 {
        0
    }

    fn gave_up(&self) {}

    #[inline]
    fn piece(&self, addr: u64, len: u64, access: Access) -> Option<HostSlice<'_>> {
        loop {
            let (first, extent, base) = self.region.get();
            let offset = addr.wrapping_sub(first);
            // Without a wrap: the region does not.
            if self.found.get() && offset <= extent && len != 0 && len - 1 <= extent - offset {
                // SAFETY: the region is mapped from `base` for `extent + 1` bytes while `physical`
                // is borrowed, and without references (`Lasting`).
                return Some(unsafe {
                    HostSlice::new(NonNull::new(base.add(offset as usize))?, len as usize)
                });
            }
            let elsewhere = !self.found.get() || offset > extent;
            elsewhere.then(|| self.look(addr, len, access))??;
        }
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

/// Asks the processor for memory that is about to be copied. A hint.
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
            let bus = Plain::new(&bus);
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
        let bus = Plain::new(&physical);
        for first in [0, 4096, last, 0] {
            let piece = bus.piece(first + 10, 20, Access::Write).unwrap();
            piece.copy_from(&first.to_be_bytes());
            let mut back = [0; 8];
            physical.read(first + 10, &mut back).unwrap();
            assert_eq!((back, piece.len()), (first.to_be_bytes(), 20));
            assert!(bus.piece(first, 4096, Access::Read).is_some());
            assert!(bus.piece(first + 4095, 1, Access::Read).is_some());
            for (offset, len) in [(4095, 2), (0, 0), (0, 4097), (0, u64::MAX)] {
                assert!(bus.piece(first + offset, len, Access::Read).is_none(), "{offset} {len}");
            }
        }
        assert!(bus.piece(9000, 1, Access::Read).is_none());
    }
}
