//! What can hold pages.

use std::ops::Range;

use ringfence_iommu::{HostAddr, Prot};
use rustix::io::Errno;

/// Contiguous pages of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Run {
    /// The first byte, at the start of a page.
    pub addr: HostAddr,
    /// How many bytes, a multiple of the page size.
    pub len: u64,
}

/// What a backing supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The size of a page in bytes, a power of two.
    pub page: u64,
    /// Most bytes of a run, a multiple of `page`.
    pub run: u64,
    /// Most runs of one call.
    pub runs: usize,
    /// How many runs can be held at a time: each takes a slot, and is released as a whole. Slots of
    /// one call never lie on both sides of a multiple of 64.
    pub slots: u32,
    /// At most this many slots have numbers below 64; the next number is 64. Few, where holding
    /// memory in a short table is cheaper: a pinner fills these first with single runs.
    pub first: u32,
}

/// What is to be released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    /// The runs in these slots.
    Slots(Range<u32>),
    /// Everything.
    All,
}

/// Something that holds pages of this process in place.
pub trait Backing {
    /// What it supports; always the same.
    fn limits(&self) -> Limits;

    /// Whether the page at `addr` is special (device registers, PFNMAP, reserved): it need not be
    /// held, and is neither charged nor ever released (rule [L54]). A backing that cannot detect
    /// this returns false, and fails to hold the page.
    ///
    /// [L54]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l54
    #[inline]
    fn is_special(&self, _addr: HostAddr) -> bool {
        false
    }

    /// Holds the first run in the slot `slot`, the second in the one after it, and so on. Returns
    /// how many runs are held, at least one; the last of these may be shortened to the part of it
    /// that is held.
    ///
    /// # Errors
    /// Nothing of the first run can be held; the call then holds nothing.
    fn hold(&mut self, slot: u32, runs: &mut [Run], prot: Prot) -> Result<usize, HoldError>;

    /// Releases held pages.
    fn release(&mut self, what: Release);
}

/// A page cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldError {
    /// The page.
    pub addr: HostAddr,
    /// The kernel's error.
    pub errno: Errno,
}

/// The size of a page of this process.
pub(super) fn page_size() -> u64 {
    // SAFETY: the call only reads a setting.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}
