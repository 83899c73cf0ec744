//! How a device reads and writes memory.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ringfence_iommu::HostAddr;

/// Most refused accesses that are recorded.
pub(super) const REMEMBERED: usize = 1024;

/// An access that the IOMMU has refused: nothing is mapped there, or not for such an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("DMA {} at {iova:#x} refused: not mapped for it", if *write { "write" } else { "read" })]
pub struct Refused {
    /// The first refused address.
    pub iova: u64,
    /// Whether it was a write.
    pub write: bool,
}

/// How many of the `len` bytes from `at` on come before the next multiple of 8.
fn ragged(at: u64, len: usize) -> usize {
    len.min((at.wrapping_neg() % 8) as usize)
}

/// Copies from memory that other threads write at the same time.
///
/// # Safety
/// `into.len()` bytes at `at` can be read.
pub(super) unsafe fn load(at: HostAddr, into: &mut [u8]) {
    let (head, rest) = into.split_at_mut(ragged(at.0, into.len()));
    let middle = at.0 + head.len() as u64;
    let (words, tail) = rest.as_chunks_mut::<8>();
    let behind = middle + words.len() as u64 * 8;
    // SAFETY: the caller promised the bytes.
    let byte = |at: u64| unsafe { AtomicU8::from_ptr(pointer(at)) }.load(Ordering::Acquire);
    head.iter_mut().zip(at.0..).for_each(|(to, at)| *to = byte(at));
    for (to, at) in words.iter_mut().zip((middle..).step_by(8)) {
        // SAFETY: the caller promised the bytes, and `middle` is aligned.
        let word = unsafe { AtomicU64::from_ptr(pointer(at)) }.load(Ordering::Acquire);
        *to = word.to_ne_bytes();
    }
    tail.iter_mut().zip(behind..).for_each(|(to, at)| *to = byte(at));
}

/// Copies to memory that other threads read at the same time; they see the bytes appear in order.
///
/// # Safety
/// `bytes.len()` bytes at `at` can be written.
pub(super) unsafe fn store(at: HostAddr, bytes: &[u8]) {
    let (head, rest) = bytes.split_at(ragged(at.0, bytes.len()));
    let middle = at.0 + head.len() as u64;
    let (words, tail) = rest.as_chunks::<8>();
    let behind = middle + words.len() as u64 * 8;
    // SAFETY: the caller promised the bytes.
    let byte = |at: u64, b| unsafe { AtomicU8::from_ptr(pointer(at)) }.store(b, Ordering::Release);
    head.iter().zip(at.0..).for_each(|(&from, at)| byte(at, from));
    for (&from, at) in words.iter().zip((middle..).step_by(8)) {
        let word = u64::from_ne_bytes(from);
        // SAFETY: the caller promised the bytes, and `middle` is aligned.
        unsafe { AtomicU64::from_ptr(pointer(at)) }.store(word, Ordering::Release);
    }
    tail.iter().zip(behind..).for_each(|(&from, at)| byte(at, from));
}

/// The address as a pointer. The owner of the memory exposed its provenance when it passed the
/// address to `map`.
fn pointer<T>(at: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(at as usize)
}
