//! Which pages a device has written, for a front end that migrates the memory meanwhile.

use ringfence_sync::atomic::{AtomicU64, Ordering};

use crate::{HostSlice, Memory, SharedFile};

/// A dirty log (rule [D26]): one bit for each page of 4096 bytes of guest-physical memory, set
/// atomically, whatever addresses the device used.
///
/// A page is marked after its bytes were written: the other end clears a bit and then copies the
/// page, so that a mark that came first could be cleared before the bytes are there.
///
/// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
#[derive(Debug)]
pub struct DirtyLog {
    file: SharedFile,
    /// Marks that found no bit.
    outside: AtomicU64,
}

impl DirtyLog {
    /// How many bytes one bit stands for, on every machine.
    pub const PAGE: u64 = 4096;

    /// A log in a file that the front end made: bit `n % 8` of byte `n / 8` is page `n`.
    pub fn new(file: SharedFile) -> DirtyLog {
        DirtyLog { file, outside: AtomicU64::new(0) }
    }

    /// How many bytes it has; never zero.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.file.len() as u64
    }

    /// Marks the pages of `len` bytes at guest-physical address `addr`; call it after they were
    /// written. If some of them lie past the end of the log, that is only counted, once: see
    /// [`outside`](Self::outside).
    pub fn mark(&self, addr: u64, len: u64) {
        let Some(more) = len.checked_sub(1) else { return };
        // Bytes past 2^64 were never written.
        let last = addr.saturating_add(more) / Self::PAGE;
        let end = self.file.len() as u64 * 8 - 1;
        let mut page = addr / Self::PAGE;
        if last > end {
            self.outside.fetch_add(1, Ordering::Relaxed);
        }
        let last = last.min(end);
        while page <= last {
            let stop = last.min(page | 7);
            let bits = 0xff << (page % 8) & 0xff >> (7 - stop % 8);
            // Release: the bytes come before the mark. A read-modify-write even if the bits are set
            // already: a plain load could happen before the bytes are visible, and the bit be
            // cleared in between.
            self.file.u8_at((page / 8) as usize).fetch_or(bits as u8, Ordering::Release);
            page = stop + 1;
        }
    }

    /// Marks bytes of this process's mapping of `memory`, by their guest-physical addresses; call
    /// it after they were written.
    pub fn mark_piece(&self, memory: &Memory, piece: HostSlice<'_>) {
        memory.gpas(piece).for_each(|(gpa, len)| self.mark(gpa, len));
    }

    /// How many marks lay past the end of the log: the other end misses these pages.
    pub fn outside(&self) -> u64 {
        self.outside.load(Ordering::Relaxed)
    }

    /// Whether the log's file was truncated under us: marks are lost.
    pub fn is_lost(&self) -> bool {
        self.file.is_lost()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::sync::atomic::Ordering::Relaxed;
    use std::{collections::BTreeSet, sync::Arc, thread};

    use proptest::prelude::*;
    use rustix::fs;

    use super::*;
    use crate::{AccessError, GuestRam, Memory, Physical, Region, Translate, sigbus};

    fn log(bytes: usize) -> (DirtyLog, SharedFile) {
        let (file, fd) = SharedFile::create(bytes).unwrap();
        (DirtyLog::new(file), SharedFile::map(fd, 0, bytes as u64).unwrap())
    }

    fn marked(file: &SharedFile) -> BTreeSet<u64> {
        let bit = |page: &u64| file.u8_at((page / 8) as usize).load(Relaxed) & 1 << (page % 8) != 0;
        (0..file.len() as u64 * 8).filter(bit).collect()
    }

    proptest! {
        #[test]
        fn exactly_the_pages_that_were_written_are_marked(
            marks in prop::collection::vec(
                prop_oneof![
                    (0..90 * 4096u64, 0..40_000u64),
                    (u64::MAX - 5000..=u64::MAX, any::<u64>()),
                ],
                1..6,
            ),
        ) {
            // rule D26
            let (log, file) = log(10);
            let mut expected = BTreeSet::new();
            let mut outside = 0;
            for (addr, len) in marks {
                log.mark(addr, len);
                if len > 0 {
                    let last = addr.saturating_add(len - 1) / 4096;
                    outside += u64::from(last >= 80);
                    expected.extend((addr / 4096).min(80)..=last.min(79));
                }
            }
            expected.remove(&80);
            prop_assert_eq!(marked(&file), expected);
            prop_assert_eq!(log.outside(), outside);
        }
    }

    #[test]
    fn a_piece_is_marked_where_its_bytes_lie_and_nowhere_else() {
        // rule D26
        let region = |gpa, size, user_addr| Region { gpa, size, user_addr, mmap_offset: 0 };
        let file = || GuestRam::new(4 * 4096, 0).unwrap().fd().try_clone_to_owned().unwrap();
        let regions = [region(0x20_000, 0x4000, 0), region(0, 0x2000, 0x10_0000)];
        let memory = Memory::map(regions.map(|region| (region, file())).into()).unwrap();
        let (log, file) = log(16);
        for (gpa, len, pages) in [
            (0x20_fff, 2, vec![0x20, 0x21]),
            (0x23_000, 0x1000, vec![0x23]),
            (0x1fff, 1, vec![1]),
            (0x1000, 0, vec![]),
        ] {
            log.mark_piece(&memory, memory.find_gpa(gpa).unwrap().slice.part(0, len));
            assert_eq!(marked(&file), pages.into_iter().collect(), "{gpa:#x}");
            (0..16).for_each(|at| file.u8_at(at).store(0, Relaxed));
        }
        // Bytes outside of this memory, and the whole address space of this process.
        let other = GuestRam::new(4096, 0).unwrap();
        log.mark_piece(&memory, other.slice(0, 4096).unwrap());
        assert!(marked(&file).is_empty());
        let whole = core::ptr::NonNull::<u8>::dangling();
        // SAFETY: nothing is read or written through it.
        log.mark_piece(&memory, unsafe { crate::HostSlice::new(whole, usize::MAX) });
        assert_eq!(marked(&file), BTreeSet::from([0, 1, 0x20, 0x21, 0x22, 0x23]));
    }

    #[test]
    fn marks_of_several_threads_do_not_undo_each_other() {
        // rule D26
        let (log, file) = log(64);
        thread::scope(|scope| {
            for thread in 0..4 {
                let log = &log;
                scope.spawn(move || (thread..512).step_by(4).for_each(|p| log.mark(p * 4096, 1)));
            }
        });
        assert_eq!(marked(&file).len(), 512);
    }

    #[test]
    fn a_log_that_is_truncated_is_survived_and_noticed() {
        sigbus::install().unwrap();
        let fd = fs::memfd_create("log", fs::MemfdFlags::CLOEXEC).unwrap();
        fs::ftruncate(&fd, 8192).unwrap();
        let file = SharedFile::map(fd.try_clone().unwrap(), 0, 8192).unwrap();
        let log = DirtyLog::new(file);
        log.mark(0, 1);
        assert!(!log.is_lost());
        fs::ftruncate(&fd, 0).unwrap();
        log.mark(4096 * 8 * 5000, 1);
        assert!(log.is_lost());
    }

    #[test]
    fn what_is_written_by_guest_physical_address_is_logged_and_what_is_read_is_not() {
        // rule D26
        let ram = GuestRam::new(16 * 4096, 0x10_0000).unwrap();
        let mut bus = Physical::new(Memory::of_ram(&ram).unwrap());
        let (log, file) = log(64);
        bus.write(0x10_0000, &[1]).unwrap();
        bus.set_log(Some(Arc::new(log)));
        bus.read(0x10_2000, &mut [0; 4]).unwrap();
        bus.write(0x10_3fff, &[1, 2]).unwrap();
        // What was written before the address that faults is logged.
        let fault = bus.write(0x10_ffff, &[1, 2]);
        assert!(matches!(fault, Err(AccessError::OutsideMemory { .. })));
        bus.set_log(None);
        bus.write(0x10_8000, &[1]).unwrap();
        assert_eq!(marked(&file), BTreeSet::from([0x103, 0x104, 0x10f]));
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::sync::Arc;

    use loom::thread;
    use ringfence_sync::{atomic::AtomicU32, model::check};

    use super::*;

    #[test]
    fn who_clears_a_bit_copies_what_was_written_or_finds_the_bit_again() {
        check(None, || {
            let log = Arc::new(DirtyLog::new(SharedFile::create(1).unwrap().0));
            let page = Arc::new(AtomicU32::new(0));
            // Loom makes an atomic in memory at its first use, which must come before other threads'.
            assert_eq!(log.file.u8_at(0).load(Ordering::Relaxed), 0);
            let (theirs, written) = (Arc::clone(&log), Arc::clone(&page));
            let device = thread::spawn(move || {
                for value in [1, 2] {
                    written.store(value, Ordering::Relaxed);
                    theirs.mark(0, 1);
                }
            });
            let clear = || log.file.u8_at(0).swap(0, Ordering::Acquire) != 0;
            let mut copy = 0;
            for _ in 0..2 {
                if clear() {
                    copy = page.load(Ordering::Relaxed);
                }
            }
            device.join().unwrap();
            if clear() {
                copy = page.load(Ordering::Relaxed);
            }
            assert_eq!(copy, 2, "a write is lost");
        });
    }
}
