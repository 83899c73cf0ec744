//! [`Policy::Auto`](crate::Policy::Auto): which mappings are copies.
//!
//! What is cheaper depends on the size, on the direction, and on the device: on its caches and its
//! IOTLB, which no model of the driver's own costs covers. So there are two layers. When the policy
//! comes into force, [`calibrate()`] measures what copies and maps cost the driver: that is the
//! first choice for each [`Cell`], a kind of mapping. Then [trials](trial) correct it while
//! mappings are made: for a few milliseconds a cell's mappings are made in one way and in the
//! other, and the way that moves more bytes is chosen; if both move the same, the one that leaves
//! the threads more CPU time.
//!
//! A map call reads its choice from [`Auto::choose`] with one load. An unmap only compares a
//! number, unless its mapping is part of a trial. Every [`LOOK_EVERY`] mappings a map call
//! [checks](Auto::note) whether a trial is due.
//!
//! While other threads want the CPU of a mapping thread
//! ([`ThreadClock::is_shared`](crate::ThreadClock::is_shared)) there are no trials: a sync waits
//! for a time slice of the device's thread, and a trial for several. Mappings that take less time
//! to copy than a thread takes to wake are then copied, and the earlier choices return once no
//! mapping thread shares its CPU.
//!
//! Both choices are strict.

#[allow(unsafe_code)]
mod calibrate;
mod cell;
mod choices;
mod costs;
mod evidence;
mod judge;
mod trial;
#[cfg(all(test, not(loom)))]
mod world;

use core::fmt;
// The atomics of `std` under loom too: what they hold is advice. They publish nothing, and a choice
// that is a moment old is as safe as a new one.
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use self::{
    cell::CELLS,
    judge::Judge,
    trial::{Mark, Seen},
};
pub(crate) use self::{cell::Cell, costs::Kind};
pub use choices::{Calibration, CellChoice, ChoiceReason, Choices, CopyCost};

/// How many mappings of a cell a clone of a device makes between two looks at the clock; a power of
/// two.
const LOOK_EVERY: u64 = 32;

/// The slice of a trial that a mapping was made in, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice(u32);

impl Slice {
    /// The slice of a mapping that no trial counts.
    pub(crate) const NONE: Slice = Slice(0);
}

/// How a mapping is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) copy: bool,
    pub(crate) slice: Slice,
}

/// A cell's choice in a word: whether there is one, what it is, and its slice.
#[derive(Clone, Copy)]
struct Word(u32);

impl Word {
    const KNOWN: u32 = 1;
    const COPY: u32 = 2;
    const SLICE_SHIFT: u32 = 2;

    fn new(copy: bool, slice: u32) -> Word {
        Word(slice << Word::SLICE_SHIFT | Word::KNOWN | if copy { Word::COPY } else { 0 })
    }

    fn choice(self) -> Option<Choice> {
        let (copy, slice) = (self.0 & Word::COPY != 0, Slice(self.0 >> Word::SLICE_SHIFT));
        (self.0 & Word::KNOWN != 0).then_some(Choice { copy, slice })
    }
}

/// A decision of the judge, for the threads that map and unmap.
struct Order {
    /// A cell whose mappings are to be made in a new way, or for a new slice.
    cell: Option<(Cell, bool)>,
    /// The current slice, 0 if there is none.
    slice: u32,
    /// Before this time unmaps are only counted.
    wake_ns: u64,
}

impl Order {
    /// The end of a cell's trial.
    fn end(cell: Cell, copy: bool) -> Order {
        Order { cell: Some((cell, copy)), slice: 0, wake_ns: u64::MAX }
    }

    /// The number after `slice`, within the bits that a [`Word`] has for it, and not 0.
    fn next_slice(slice: u32) -> u32 {
        let next = slice.wrapping_add(1) & (u32::MAX >> Word::SLICE_SHIFT);
        if next == 0 { 1 } else { next }
    }
}

/// What a clone of a device copied and mapped, cell by cell.
#[derive(Debug)]
pub(crate) struct Tally {
    copied: [AtomicU64; CELLS],
    mapped: [AtomicU64; CELLS],
}

impl Default for Tally {
    fn default() -> Tally {
        let zeros = || [const { AtomicU64::new(0) }; CELLS];
        Tally { copied: zeros(), mapped: zeros() }
    }
}

impl Tally {
    fn count(&self, cell: Cell, copied: bool) -> u64 {
        let counts = if copied { &self.copied } else { &self.mapped };
        counts[cell.index()].fetch_add(1, Relaxed)
    }

    pub(crate) fn add_to(&self, sum: &Tally) {
        let add = |sums: &[AtomicU64], counts: &[AtomicU64]| {
            sums.iter()
                .zip(counts)
                .for_each(|(sum, n)| _ = sum.fetch_add(n.load(Relaxed), Relaxed));
        };
        add(&sum.copied, &self.copied);
        add(&sum.mapped, &self.mapped);
    }
}

/// Decides for a device which of its mappings are copies.
pub(crate) struct Auto {
    words: [AtomicU32; CELLS],
    /// The current slice, 0 if there is none.
    slice: AtomicU32,
    wake_ns: AtomicU64,
    /// Mappings that were unmapped in their slice, over all slices, and their bytes. A late one
    /// counts for the next slice, which hardly matters among hundreds.
    mappings: AtomicU64,
    bytes: AtomicU64,
    /// Threads that map or unmap only try this lock: a decision can wait for the next mapping.
    judge: Mutex<Judge>,
}

impl Auto {
    pub(crate) fn new() -> Auto {
        Auto {
            words: [const { AtomicU32::new(0) }; CELLS],
            slice: AtomicU32::new(0),
            wake_ns: AtomicU64::new(u64::MAX),
            mappings: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            judge: Mutex::new(Judge::new()),
        }
    }

    /// Starts over, with a new calibration.
    pub(crate) fn restart(&self, calibration: Calibration) {
        let mut judge = self.judge.lock();
        judge.restart(calibration);
        self.slice.store(0, Relaxed);
        self.wake_ns.store(u64::MAX, Relaxed);
        self.words.iter().for_each(|word| word.store(0, Relaxed));
    }

    /// How a mapping is to be made.
    #[inline]
    pub(crate) fn choose(&self, cell: Cell, kind: impl FnOnce() -> Kind) -> Choice {
        let word = Word(self.words[cell.index()].load(Relaxed));
        word.choice().unwrap_or_else(|| self.first(cell, kind()))
    }

    #[cold]
    fn first(&self, cell: Cell, kind: Kind) -> Choice {
        let slice = Slice::NONE;
        let Some(mut judge) = self.judge.try_lock() else { return Choice { copy: false, slice } };
        let copy = judge.first(cell, kind);
        let word = &self.words[cell.index()];
        // Another thread may have been first.
        if word.load(Relaxed) == 0 {
            word.store(Word::new(copy, 0).0, Relaxed);
        }
        Choice { copy, slice }
    }

    /// Counts a mapping that was made, and looks from time to time whether a trial is due.
    /// `shared`: whether a sync would wait for a time slice of another thread.
    #[inline]
    pub(crate) fn note(
        &self,
        cell: Cell,
        copied: bool,
        tally: &Tally,
        now_ns: impl Fn() -> u64,
        shared: impl Fn() -> bool,
    ) {
        if tally.count(cell, copied) % LOOK_EVERY == LOOK_EVERY - 1 {
            self.look(cell, now_ns(), shared());
        }
    }

    #[cold]
    fn look(&self, cell: Cell, now_ns: u64, shared: bool) {
        if let Some(mut judge) = self.judge.try_lock()
            && let Some(order) = judge.look(cell, now_ns, shared)
        {
            self.carry_out(order);
        }
    }

    /// A mapping of a slice is being unmapped. Called at the same point for copies and maps: when
    /// the driver requests the unmap.
    #[cold]
    pub(crate) fn unmapping(
        &self,
        slice: Slice,
        len: u64,
        now_ns: impl Fn() -> u64,
        mark: impl Fn() -> Mark,
    ) {
        let is_current = || self.slice.load(Relaxed) == slice.0 && slice != Slice::NONE;
        if !is_current() {
            return;
        }
        let now_ns = now_ns();
        let mappings = self.mappings.fetch_add(1, Relaxed);
        let bytes = self.bytes.fetch_add(len, Relaxed);
        if now_ns < self.wake_ns.load(Relaxed) {
            return;
        }
        if let Some(mut judge) = self.judge.try_lock()
            && is_current()
            && let Some(order) = judge.unmapped(Seen { now_ns, mappings, bytes }, mark)
        {
            self.carry_out(order);
        }
    }

    /// The caller holds the judge's lock.
    fn carry_out(&self, order: Order) {
        let Order { cell, slice, wake_ns } = order;
        self.slice.store(slice, Relaxed);
        self.wake_ns.store(wake_ns, Relaxed);
        if let Some((cell, copy)) = cell {
            self.words[cell.index()].store(Word::new(copy, slice).0, Relaxed);
        }
    }

    /// What was chosen, and why; `tally` is the sum over all clones.
    pub(crate) fn choices(&self, tally: &Tally) -> Choices {
        let judge = self.judge.lock();
        let cells = Cell::all().filter_map(|cell| {
            let (copies, reason) = judge.choice(cell)?;
            Some(CellChoice {
                direction: cell.direction(),
                bytes: cell.bytes(),
                scattered: cell.is_scattered(),
                copied: tally.copied[cell.index()].load(Relaxed),
                mapped: tally.mapped[cell.index()].load(Relaxed),
                copies,
                reason,
            })
        });
        let cells = cells.collect();
        Choices { calibration: judge.calibration().clone(), cells }
    }
}

impl fmt::Debug for Auto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auto").finish_non_exhaustive()
    }
}

/// What the calling thread has done by now, as counted by a clone of a device.
pub(crate) fn mark(clone: usize, cpu_ns: u64, bytes: u64) -> Mark {
    thread_local! {
        static HERE: core::cell::Cell<u8> = const { core::cell::Cell::new(0) };
    }
    // The address of a thread-local variable identifies the thread, without a heap allocation.
    let thread = HERE.with(|here| core::ptr::from_ref(here).addr());
    Mark { source: (thread, clone), cpu_ns, bytes }
}
