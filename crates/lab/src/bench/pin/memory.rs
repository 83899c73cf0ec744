//! Memory to pin: small pages, transparent huge pages, reserved huge pages.

use std::{ffi::c_void, fs, ptr};

use anyhow::{Context, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::{params::Backing, set::PAGE};
use crate::{memory, text};

/// The size of a huge page if the kernel does not report it.
const HUGE: usize = 2 << 20;

/// Memory of one kind, all of it present.
pub(super) struct Memory {
    mapped: *mut c_void,
    mapped_len: usize,
    first: usize,
    /// Its bytes.
    pub(super) len: usize,
}

impl Memory {
    /// Memory of `pages` pages.
    ///
    /// # Errors
    /// The outer: the system has no memory. The inner: it has none of this kind, and what would help.
    pub(super) fn new(backing: Backing, pages: usize) -> Result<Result<Memory, String>> {
        let huge = huge_page();
        let len = (pages * PAGE).next_multiple_of(huge);
        if backing == Backing::Hugetlb {
            // All huge pages are reserved when they are mapped.
            let memory = map(len, MapFlags::PRIVATE | MapFlags::HUGETLB);
            return Ok(memory.inspect(Memory::touch).map_err(|_| no_hugetlb(len, huge)));
        }
        // More than that, so that it can be aligned to huge pages.
        let mut memory = map(len + huge, MapFlags::PRIVATE).context("memory to pin")?;
        memory.first = memory.first.next_multiple_of(huge);
        memory.len = len;
        let advice = match backing {
            Backing::Thp => Advice::LinuxHugepage,
            _ => Advice::LinuxNoHugepage,
        };
        // SAFETY: the range lies in a mapping that nothing else refers to; the advice changes no
        // bytes. A kernel without huge pages refuses it, which is found below.
        let _ = unsafe { madvise(memory.first as *mut c_void, len, advice) };
        memory.touch();
        let found = memory.huge_bytes();
        if backing == Backing::Thp && found < len {
            return Ok(Err(format!(
                "thp did not run: {} of {} became huge pages; \
                 /sys/kernel/mm/transparent_hugepage/enabled must hold [madvise] or [always], and \
                 memory must not be fragmented (echo 1 > /proc/sys/vm/compact_memory)",
                text::bytes(found as u64),
                text::bytes(len as u64),
            )));
        }
        Ok(Ok(memory))
    }

    /// The address of a page in this process.
    #[inline]
    pub(super) fn page(&self, page: usize) -> usize {
        debug_assert!(page * PAGE < self.len);
        self.first + page * PAGE
    }

    /// Writes to every page, so that it is present.
    fn touch(&self) {
        for at in (self.first..self.first + self.len).step_by(PAGE) {
            // SAFETY: the address lies in the mapping, which is writable, and nothing else refers
            // to it.
            unsafe { ptr::write_volatile(at as *mut u8, 1) };
        }
    }

    /// How many bytes are transparent huge pages.
    fn huge_bytes(&self) -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        huge_bytes(&smaps, self.first, self.first + self.len).min(self.len)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this mapping was made here, and nothing refers to it: pinned pages of it have a
        // reference of their own in the kernel.
        let _ = unsafe { munmap(self.mapped, self.mapped_len) };
    }
}

fn map(len: usize, flags: MapFlags) -> rustix::io::Result<Memory> {
    // SAFETY: a new mapping at an address that the kernel chooses: it replaces none.
    let mapped =
        unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)? };
    Ok(Memory { mapped, mapped_len: len, first: mapped as usize, len })
}

fn no_hugetlb(len: usize, huge: usize) -> String {
    let pages = len.div_ceil(huge);
    let free = memory::number("/proc/meminfo", "HugePages_Free").unwrap_or(0);
    format!(
        "hugetlb did not run: it takes {pages} huge pages of {}, and {free} are free; as root, \
         `sysctl vm.nr_hugepages={pages}` sets them apart (and 0 gives them back)",
        text::bytes(huge as u64),
    )
}

/// The size of the system's huge pages.
fn huge_page() -> usize {
    memory::number("/proc/meminfo", "Hugepagesize")
        .map_or(HUGE, |kib| (kib as usize) << 10)
        .max(HUGE)
}

/// The bytes of transparent huge pages in the mappings of `smaps` that share addresses with a range:
/// the kernel joins mappings that lie side by side.
fn huge_bytes(smaps: &str, first: usize, end: usize) -> usize {
    let (mut inside, mut bytes) = (false, 0);
    for line in smaps.lines() {
        let word = line.split(' ').next().unwrap_or_default();
        if let Some((from, to)) = word.split_once('-') {
            let at = |text| usize::from_str_radix(text, 16).unwrap_or(usize::MAX);
            inside = at(from) < end && at(to) > first;
        } else if let (true, Some(kib)) = (inside, line.strip_prefix("AnonHugePages:")) {
            let kib = kib.split_ascii_whitespace().next().and_then(|kib| kib.parse::<usize>().ok());
            bytes += kib.unwrap_or(0) << 10;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pages_are_no_huge_ones() {
        let Ok(memory) = Memory::new(Backing::Small, 1024).unwrap() else { panic!() };
        assert_eq!(memory.huge_bytes(), 0);
        assert!(memory.len >= 1024 * PAGE && memory.page(0).is_multiple_of(huge_page()));
        assert_eq!(memory.page(1023) - memory.page(0), 1023 * PAGE);
    }

    #[test]
    fn missing_memory_is_reported_with_a_remedy() {
        for backing in [Backing::Thp, Backing::Hugetlb] {
            match Memory::new(backing, 1024).unwrap() {
                Ok(memory) if backing == Backing::Thp => {
                    assert_eq!(memory.huge_bytes(), memory.len);
                }
                Ok(_) => {}
                Err(why) => assert!(why.contains("did not run"), "{why}"),
            }
        }
        let why = no_hugetlb(32 << 20, 2 << 20);
        assert!(why.contains("16 huge pages of 2 MiB"), "{why}");
        assert!(why.contains("vm.nr_hugepages=16"), "{why}");
    }

    #[test]
    fn huge_pages_are_found_in_their_mapping_only() {
        let smaps = "7f00-8000 rw-p 00000000 00:00 0 \nSize: 1 kB\nAnonHugePages:      4 kB\n\
                     8000-9000 rw-p 00000000 00:00 0 \nAnonHugePages:    2048 kB\n\
                     9000-a000 rw-p 0 00:00 0 [heap]\nAnonHugePages:    6144 kB\n";
        assert_eq!(huge_bytes(smaps, 0x8000, 0x9000), 2 << 20);
        assert_eq!(huge_bytes(smaps, 0x8000, 0xa000), 8 << 20);
        assert_eq!(huge_bytes(smaps, 0x8fff, 0x9000), 2 << 20);
        assert_eq!(huge_bytes(smaps, 0xa000, 0xb000), 0);
    }
}
