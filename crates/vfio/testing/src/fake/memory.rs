//! What lies behind the addresses of a process: its pages, and where their frames lie.

use std::collections::BTreeMap;

use rustix::{io::Errno, mm::MsyncFlags};

use super::{PAGE, SHIFT};
use ringfence_vfio::kernel::KernelResult;

/// The kind of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Ordinary memory with contiguous frames.
    Contiguous,
    /// Ordinary memory with frames that are contiguous only within naturally aligned runs of this
    /// many pages.
    Scattered(u64),
    /// Ordinary memory that must not be written: pinning it for writing is EFAULT.
    ReadOnly,
    /// Device memory or other pages that are not ordinary memory (PFNMAP, reserved): neither
    /// charged nor unpinned (rule [L54]).
    ///
    /// [L54]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l54
    Reserved,
    /// Nothing: pinning it is EFAULT.
    Absent,
}

/// The memory of a process as a fake kernel sees it: ordinary and contiguous, except where [set
/// otherwise](Self::with).
#[derive(Clone, Debug)]
pub struct Memory {
    process: bool,
    pages: u64,
    parts: BTreeMap<u64, (u64, Kind)>,
}

/// Contiguous frames, all of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frames {
    /// The number of the first.
    pub(super) pfn: u64,
    /// How many.
    pub(super) pages: u64,
    /// Whether they are not ordinary memory.
    pub(super) reserved: bool,
}

impl Memory {
    /// What this process has mapped: an address at which nothing is mapped is EFAULT, and devices
    /// access the bytes.
    pub fn process() -> Memory {
        Memory { process: true, pages: u64::MAX, parts: BTreeMap::new() }
    }

    /// `pages` frames for addresses that need not be mapped: any address will do, and there are no
    /// bytes for a device to access. When all frames are pinned, pinning is ENOMEM.
    pub fn pretended(pages: u64) -> Memory {
        Memory { process: false, pages, parts: BTreeMap::new() }
    }

    /// Makes `pages` pages from the address `vaddr` on of another kind. Parts must not overlap, but
    /// a part that begins where another begins replaces it.
    #[must_use]
    pub fn with(mut self, vaddr: u64, pages: u64, kind: Kind) -> Memory {
        if pages > 0 {
            let first = vaddr >> SHIFT;
            self.parts.insert(first, (first.saturating_add(pages - 1), kind));
        }
        self
    }

    /// Whether there are bytes.
    pub(super) fn has_bytes(&self) -> bool {
        self.process
    }

    /// The kind of a page, and how many pages from it on belong to the same part, up to `most`.
    fn part(&self, page: u64, most: u64) -> (Kind, u64) {
        if let Some((_, &(last, kind))) = self.parts.range(..=page).next_back()
            && page <= last
        {
            return (kind, most.min((last - page).saturating_add(1)));
        }
        let next = self.parts.range(page..).next().map_or(u64::MAX, |(&first, _)| first);
        (Kind::Contiguous, most.min(next - page))
    }

    /// How many of `pages` pages from `vaddr` on one call can pin, when `pinned` are pinned
    /// already.
    pub(super) fn reach(
        &self,
        vaddr: u64,
        pages: u64,
        write: bool,
        pinned: u64,
    ) -> KernelResult<u64> {
        let (first, mut reach) = (vaddr >> SHIFT, 0);
        while reach < pages {
            let (kind, count) = self.part(first + reach, pages - reach);
            if kind == Kind::Absent || kind == Kind::ReadOnly && write {
                break;
            }
            reach += count;
        }
        if self.process {
            reach = mapped(vaddr, reach);
        }
        match reach.min(self.pages.saturating_sub(pinned)) {
            0 if reach > 0 => Err(Errno::NOMEM),
            0 => Err(Errno::FAULT),
            reach => Ok(reach),
        }
    }

    /// The run of frames that begins with the page at `vaddr`, at most `pages` long.
    pub(super) fn frames(&self, vaddr: u64, pages: u64) -> Frames {
        let page = vaddr >> SHIFT;
        let (kind, count) = self.part(page, pages);
        match kind {
            Kind::Scattered(run) => {
                let run = run.clamp(1, 1 << 40);
                let (block, offset) = (page / run, page % run);
                // Each run has its own place, with a gap behind it: no two pages share a frame.
                let pfn = 1 << 60 | (block * 2 * run + offset);
                Frames { pfn, pages: count.min(run - offset), reserved: false }
            }
            kind => Frames { pfn: page, pages: count, reserved: kind == Kind::Reserved },
        }
    }
}

/// How many of `pages` pages from `vaddr` on are mapped in this process.
fn mapped(vaddr: u64, pages: u64) -> u64 {
    let there = |pages: u64| {
        let Ok(len) = usize::try_from(pages * PAGE) else { return false };
        let at = std::ptr::without_provenance_mut(vaddr as usize);
        // An asynchronous msync only checks whether everything is mapped.
        // SAFETY: it neither reads nor changes memory.
        unsafe { rustix::mm::msync(at, len, MsyncFlags::ASYNC) }.is_ok()
    };
    if pages == 0 || there(pages) {
        return pages;
    }
    // The mapped pages from the first one on are a prefix: halve the unknown part.
    let (mut good, mut bad) = (0, pages);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if there(middle) { good = middle } else { bad = middle }
    }
    good
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_frames_or_the_kind_do() {
        let memory = Memory::pretended(100)
            .with(0x10_0000, 8, Kind::Scattered(4))
            .with(0x20_0000, 1, Kind::Reserved)
            .with(0x20_1000, 1, Kind::Absent);
        let frames = |vaddr, pages| memory.frames(vaddr, pages);
        assert_eq!(frames(0xf_f000, 4), Frames { pfn: 0xff, pages: 1, reserved: false });
        assert_eq!(frames(0x10_2000, 9).pages, 2);
        assert_ne!(frames(0x10_3000, 1).pfn + 1, frames(0x10_4000, 1).pfn);
        assert!(frames(0x20_0000, 1).reserved);
        assert_eq!(memory.reach(0x1f_f000, 9, false, 0), Ok(2));
        assert_eq!(memory.reach(0x1f_f000, 9, false, 99), Ok(1));
        assert_eq!(memory.reach(0x1f_f000, 9, false, 100), Err(Errno::NOMEM));
        assert_eq!(memory.reach(0x20_1000, 9, false, 0), Err(Errno::FAULT));
    }

    #[test]
    fn what_the_process_has_not_mapped_is_not_there() {
        let memory = Memory::process();
        assert_eq!(memory.reach(0, 1, false, 0), Err(Errno::FAULT));
        let here = std::ptr::from_ref(&memory).addr() as u64 & !(PAGE - 1);
        assert_eq!(memory.reach(here, 1, true, 0), Ok(1));
        assert_eq!(memory.reach(!(PAGE - 1), 1, false, 0), Err(Errno::FAULT));
    }
}
