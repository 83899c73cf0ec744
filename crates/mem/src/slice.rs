//! Pieces of memory that another process may write at any time: copied from and to, never borrowed.
//!
//! A `&[u8]` to such memory would be undefined behaviour: the compiler may read the memory twice
//! and assume that both reads agree. A copy is settled: the bytes that were checked are the bytes
//! that are used ([`settle`]).

use core::{arch::asm, fmt, marker::PhantomData, ptr::NonNull};

/// A piece of shared memory in this process. Another process may change its bytes at any time, so
/// they are only ever copied, never borrowed.
#[derive(Clone, Copy)]
pub struct HostSlice<'m> {
    base: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'m ()>,
}

impl fmt::Debug for HostSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostSlice({:p}, {} bytes)", self.base, self.len)
    }
}

impl<'m> HostSlice<'m> {
    /// A piece of `len` bytes at `base`.
    ///
    /// # Safety
    /// The bytes are mapped readable and writable for as long as `'m`, and no Rust reference to
    /// any of them is used meanwhile.
    #[inline]
    pub unsafe fn new(base: NonNull<u8>, len: usize) -> HostSlice<'m> {
        HostSlice { base, len, memory: PhantomData }
    }

    /// How many bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the piece begins, for a system call that moves the bytes itself.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The part of `len` bytes from `offset`, cut at the end of the piece.
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> HostSlice<'m> {
        let offset = offset.min(self.len);
        let len = len.min(self.len - offset);
        // SAFETY: `offset` is at most `self.len`, so the result stays in the piece (or one past it).
        HostSlice { base: unsafe { self.base.add(offset) }, len, memory: PhantomData }
    }

    /// Copies the first bytes of the piece out, as many as both hold; returns how many.
    #[inline]
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        let len = self.len.min(out.len());
        // SAFETY: both sides hold `len` bytes; `out` is exclusively borrowed, and by the contract
        // of `new` no reference overlaps the piece, so they do not overlap.
        unsafe { copy(self.base.as_ptr(), out.as_mut_ptr(), len) };
        len
    }

    /// Copies bytes into the piece, as many as both hold; returns how many.
    #[inline]
    pub fn copy_from(&self, data: &[u8]) -> usize {
        let len = self.len.min(data.len());
        // SAFETY: as in `copy_to`, with the roles exchanged.
        unsafe { copy(data.as_ptr(), self.base.as_ptr(), len) };
        len
    }

    /// Copies bytes of another piece into this one, as many as both hold; returns how many. The two
    /// may overlap.
    #[inline]
    pub fn copy_from_piece(&self, data: ReadSlice<'_>) -> usize {
        let len = self.len.min(data.0.len);
        // SAFETY: both sides are mapped for `len` bytes. Others may write meanwhile: as in `copy`.
        unsafe { self.base.as_ptr().copy_from(data.0.base.as_ptr(), len) };
        settle(self.base.as_ptr());
        len
    }

    /// Writes `byte` to every byte of the piece.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the piece is mapped writable for its whole length (contract of `new`).
        unsafe { self.base.as_ptr().write_bytes(byte, self.len) };
        settle(self.base.as_ptr());
    }

    /// Writes zeroes over the piece.
    pub fn fill_zero(&self) {
        self.fill(0);
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        ReadSlice(*self).to_vec()
    }
}

/// Exclusively borrowed bytes can also serve as a piece to copy from and to.
impl<'m> From<&'m mut [u8]> for HostSlice<'m> {
    #[inline]
    fn from(bytes: &'m mut [u8]) -> HostSlice<'m> {
        HostSlice { base: NonNull::from(&mut *bytes).cast(), len: bytes.len(), memory: PhantomData }
    }
}

/// Fetches a line of the processor's cache for exclusive access, before it is written. A hint.
#[inline]
pub fn soon_written(line: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect on the program, whatever the address. Processors that do not
    // know this one execute it as a NOP.
    unsafe {
        asm!(
            "prefetchw [{line}]",
            line = in(reg) line,
            options(nostack, preserves_flags, readonly),
        );
    }
    let _ = line;
}

/// A piece of memory that is only read, be it shared or this process's own.
#[derive(Clone, Copy)]
pub struct ReadSlice<'m>(HostSlice<'m>);

impl fmt::Debug for ReadSlice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadSlice({:p}, {} bytes)", self.0.base, self.0.len)
    }
}

impl<'m> ReadSlice<'m> {
    /// How many bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The part of `len` bytes from `offset`, cut at the end of the piece.
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> ReadSlice<'m> {
        ReadSlice(self.0.part(offset, len))
    }

    /// Copies the first bytes of the piece out, as many as both hold; returns how many.
    #[inline]
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        self.0.copy_to(out)
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes);
        bytes
    }
}

impl<'m> From<HostSlice<'m>> for ReadSlice<'m> {
    #[inline]
    fn from(piece: HostSlice<'m>) -> ReadSlice<'m> {
        ReadSlice(piece)
    }
}

impl<'m> From<&'m [u8]> for ReadSlice<'m> {
    #[inline]
    fn from(bytes: &'m [u8]) -> ReadSlice<'m> {
        // `ReadSlice` has no method that writes.
        ReadSlice(HostSlice {
            base: NonNull::from(bytes).cast(),
            len: bytes.len(),
            memory: PhantomData,
        })
    }
}

/// Copies `len` bytes, of which either side may lie in memory that another process writes
/// meanwhile: each byte of the copy is then either old or new, and does not change afterwards.
///
/// # Safety
/// `from` may be read and `to` be written for `len` bytes, and they do not overlap.
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { to.copy_from_nonoverlapping(from, len) };
    settle(to);
}

/// Makes the compiler forget what it knows about the bytes at `at`.
///
/// To the compiler a copy is an equation: as nothing seems to change the source, it may read the
/// source again where the copy is read, and then the bytes that are used are not those that were
/// checked. This empty piece of assembly gets the address of the copy and may, as far as the
/// compiler knows, read and write what it points to. So the copy must be complete in memory before
/// it, and later reads of the copy can only come from there: the compiler no longer knows that it
/// ever equalled the source. The same holds for a copy into shared memory: later reads of the
/// original do not come from memory that another process may have changed.
///
/// Volatile reads would say the same, word by word; this leaves the copy to `memcpy`.
#[inline(always)]
fn settle(at: *mut u8) {
    // SAFETY: it does nothing. It is neither `nomem` nor `readonly`, on purpose.
    unsafe { asm!("/* {0} */", in(reg) at, options(nostack, preserves_flags)) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn what_does_not_fit_is_cut_and_pieces_may_overlap() {
        let mut bytes = [1, 2, 3, 4, 5, 6];
        let piece = HostSlice::from(&mut bytes[..]);
        assert_eq!(piece.part(1, 5).copy_from_piece(piece.part(0, 5).into()), 5);
        assert_eq!(piece.to_vec(), [1, 1, 2, 3, 4, 5]);
        assert_eq!(piece.part(4, 9).copy_from(&[7, 8, 9]), 2);
        assert_eq!(piece.part(6, 1).len(), 0);
        piece.part(0, 2).fill(9);
        let mut out = [0; 8];
        assert_eq!(ReadSlice::from(piece).part(1, 9).copy_to(&mut out), 5);
        assert_eq!(out, [9, 2, 3, 7, 8, 0, 0, 0]);
        assert_eq!(ReadSlice::from(&out[..]).part(7, 9).to_vec(), [0]);
    }

    /// Without [`settle`] an optimised build copies `kept` from the source again, since `copy` was
    /// copied from there, and the bytes that are kept are not those that were checked.
    #[test]
    fn what_was_checked_is_what_is_used_while_another_writes() {
        #[inline(never)]
        fn check_and_keep(from: HostSlice<'_>, at: usize, kept: &mut [u8; LEN]) -> u8 {
            if from.len() != LEN {
                return 0;
            }
            let mut copy = [0; LEN];
            from.copy_to(&mut copy);
            let checked = copy[at % LEN];
            *kept = copy;
            checked
        }
        const LEN: usize = 256;
        let mut memory = [0u8; LEN];
        let (base, done) = (NonNull::from(&mut memory).expose_provenance(), AtomicBool::new(false));
        // SAFETY: the array outlives the threads, which reach it by pieces alone.
        let piece = || unsafe { HostSlice::new(NonNull::with_exposed_provenance(base), LEN) };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for byte in (0..=u8::MAX).cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                    piece().fill(byte);
                }
            });
            let mut kept = [0; LEN];
            let differs =
                (0..1_000_000).find(|at| check_and_keep(piece(), *at, &mut kept) != kept[at % LEN]);
            done.store(true, Ordering::Relaxed);
            assert_eq!(differs, None, "the memory was read twice");
        });
    }
}
