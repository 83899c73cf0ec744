//! What the domains over a kernel share: which mappings there are, how they are merged, and how
//! large ones are made in steps.

mod domain;
mod errors;
mod geometry;
mod shadow;
mod tuning;

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use ringfence_iommu::{Error, Geometry, HostAddr, Iova, Map, Prot, Range, Result};
use rustix::io::Errno;

pub(crate) use errors::{collect, lost, refused};
pub(crate) use geometry::geometry;
pub(crate) use shadow::Unit;
use shadow::{Shadow, Stage};
pub use tuning::{Tuning, Usage};

use crate::{
    DirtyMap,
    kernel::{KernelResult, MapFlags},
};

/// A kernel's address space.
pub trait Backend: Send + Sync {
    /// What a domain over it is called.
    const NAME: &'static str;

    /// Maps.
    ///
    /// # Safety
    /// As [`Type1Kernel::map`](crate::kernel::Type1Kernel::map).
    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()>;

    /// Unmaps whole mappings; returns how many bytes were mapped.
    fn unmap(&self, iova: u64, size: u64) -> KernelResult<u64>;

    /// Whether it can unmap everything at one go.
    fn has_unmap_all(&self) -> bool {
        true
    }

    /// Unmaps everything at one go; returns how many bytes were mapped.
    fn unmap_all(&self) -> KernelResult<u64>;

    /// The error that `errno` means for a map of `range`, while there are this many entries.
    fn refusal(&self, errno: Errno, range: Range, entries: u64) -> Error;

    /// What can be mapped now.
    fn geometry(&self) -> Result<Geometry>;

    /// Starts or stops tracking dirty pages.
    fn track(&self, on: bool) -> Result<()>;

    /// The page size of dirty bits, where that of mappings is `granule`.
    fn dirty_page(&self, granule: u64) -> Result<u64>;

    /// Marks in `map` the pages of a piece that were written to since the last call.
    fn collect(&self, piece: Range, page: u64, map: &mut DirtyMap) -> Result<()>;
}

/// A domain over an address space of the kernel. It maps to addresses of this process, whose pages
/// the kernel pins.
///
/// Dropping it unmaps everything, so that devices that live longer can access nothing.
// Every target comes from a `Map`, with its promise.
pub struct Space<B: Backend> {
    pub(crate) backend: B,
    tuning: Tuning,
    state: Mutex<State>,
    /// A unit is no longer busy.
    settled: Condvar,
    mismatches: AtomicU64,
}

#[derive(Debug)]
struct State {
    geometry: Geometry,
    shadow: Shadow,
    entries: u64,
    /// Maps that failed and could not be undone completely, with their errors: their sync returns
    /// the error, until they are unmapped.
    left: Vec<(Range, Error)>,
    /// If set, nothing can be mapped or unmapped; the reason.
    frozen: Option<&'static str>,
}

impl<B: Backend> Space<B> {
    /// An empty space. A chunk is a power of two, and at least a granule.
    pub(crate) fn over(backend: B, geometry: Geometry, tuning: Tuning) -> Space<B> {
        let granule = geometry.page_sizes.granule();
        let chunk = 1 << (63 - tuning.chunk.max(granule).leading_zeros());
        let shadow = Shadow::default();
        Space {
            backend,
            tuning: Tuning { chunk, ..tuning },
            state: Mutex::new(State {
                geometry,
                shadow,
                entries: 0,
                left: Vec::new(),
                frozen: None,
            }),
            settled: Condvar::new(),
            mismatches: AtomicU64::new(0),
        }
    }

    /// `Domain::map_pages`, of one.
    fn map_one(&self, map: &Map<HostAddr>) -> Result<()> {
        if !self.tuning.merge {
            let made = self.map_now(map);
            return made.or_else(|Failed { error, left }| match left {
                // A map that fails must leave nothing; if a sync fails, the caller unmaps.
                true => {
                    self.state.lock().left.push((map.range(), error));
                    Ok(())
                }
                false => Err(error),
            });
        }
        let unit = Unit::new(map, Stage::Noted);
        let mut state = self.state.lock();
        state.check(map)?;
        state.shadow.insert(unit);
        Ok(())
    }

    /// Maps in the kernel at once.
    fn map_now(&self, map: &Map<HostAddr>) -> std::result::Result<(), Failed> {
        let unit = Unit::new(map, Stage::Busy);
        {
            let mut state = self.state.lock();
            state.check(map)?;
            state.shadow.insert(unit);
        }
        let made = self.make(&unit);
        self.settle(&[unit], &unit, &made);
        made
    }

    /// `Domain::iotlb_sync_map`: makes in the kernel what was noted in `range`.
    fn sync_map(&self, range: Range) -> Result<()> {
        if !self.tuning.merge {
            // The kernel has these mappings; what could not be undone is an error.
            let state = self.state.lock();
            let left = state.left.iter().find(|(left, _)| left.overlaps(range));
            return left.map_or(Ok(()), |&(_, error)| Err(error));
        }
        let noted: Vec<Unit> = {
            let mut state = self.state.lock();
            if let Some(why) = state.frozen {
                return Err(Error::Unsupported(why));
            }
            let units = state.shadow.in_range(range).filter(|unit| unit.stage == Stage::Noted);
            let noted: Vec<Unit> = units.copied().collect();
            noted.iter().for_each(|unit| state.shadow.set(unit.range, Stage::Busy));
            noted
        };
        let mut result = Ok(());
        for run in noted.chunk_by(Unit::leads_to) {
            let whole = Unit { range: run[0].range.hull(run[run.len() - 1].range), ..run[0] };
            let made = self.make(&whole);
            self.settle(run, &whole, &made);
            result = result.and(made.map_err(|failed| failed.error));
        }
        result
    }

    /// Replaces the busy units of a run according to the outcome.
    fn settle(&self, run: &[Unit], whole: &Unit, made: &std::result::Result<(), Failed>) {
        let mut state = self.state.lock();
        run.iter().for_each(|unit| state.shadow.remove(unit.range));
        if made.as_ref().map_or_else(|failed| failed.left, |()| true) {
            state.shadow.insert(Unit { stage: Stage::Made, ..*whole });
            state.entries += self.entries(whole.range);
        }
        self.settled.notify_all();
    }

    /// The kernel mappings that a unit consists of.
    fn pieces(&self, whole: Range) -> impl Iterator<Item = Range> + use<B> {
        let chunk = self.tuning.chunk - 1;
        let mut next = Some(whole.first());
        std::iter::from_fn(move || {
            let first = next?;
            let last = Iova(first.0.saturating_add(chunk)).min(whole.last());
            next = last.0.checked_add(1).map(Iova).filter(|&next| next <= whole.last());
            Range::new(first, last)
        })
    }

    /// How many kernel mappings a unit takes.
    fn entries(&self, whole: Range) -> u64 {
        whole.extent() / self.tuning.chunk + 1
    }

    /// Makes a unit in the kernel, piece by piece. All or nothing (rule L33).
    fn make(&self, unit: &Unit) -> std::result::Result<(), Failed> {
        let flags = flags(unit.prot);
        for (done, piece) in self.pieces(unit.range).enumerate() {
            let iova = piece.first().0;
            let vaddr = unit.target.0 + (iova - unit.range.first().0);
            // SAFETY: the promise that the `Map` was made with. The target has been checked not to
            // pass the end of the address space.
            let made = unsafe { self.backend.map(flags, iova, vaddr, size(piece)) };
            let Err(errno) = made else { continue };
            let entries = self.state.lock().entries + done as u64;
            let error = self.backend.refusal(errno, unit.range, entries);
            let undone = |piece| self.remove(piece).is_ok();
            let left =
                !self.pieces(unit.range).take(done).map(undone).fold(true, |all, it| all & it);
            return Err(Failed { error, left });
        }
        Ok(())
    }

    /// `Domain::unmap_pages`, of one, complete when it returns; returns how many bytes were mapped.
    fn unmap_one(&self, range: Range) -> Result<u128> {
        self.unmap_with(range, &mut |piece| self.remove(piece))
    }

    /// As [`unmap_one`](Self::unmap_one), with another way to remove whole kernel mappings, one or
    /// several that follow each other, of a chunk at most.
    pub(crate) fn unmap_with(
        &self,
        range: Range,
        remove: &mut dyn FnMut(Range) -> Result<()>,
    ) -> Result<u128> {
        let (made, mut bytes) = self.take(range)?;
        let mut result = Ok(());
        for (run, units) in self.runs(&made) {
            result = result.and_then(|()| self.pieces(run).try_for_each(&mut *remove));
            if result.is_ok() {
                bytes += run.len();
            }
            self.give_back(units, result.is_ok());
        }
        result.map(|()| bytes)
    }

    /// Waits until no unit in `range` is busy, then marks them all as busy, for the caller to
    /// remove. Units that the kernel does not have yet are removed at once; returns their bytes
    /// too.
    fn take(&self, range: Range) -> Result<(Vec<Unit>, u128)> {
        let mut state = self.state.lock();
        state.geometry.check_unmap(range)?;
        while state.shadow.in_range(range).any(|unit| unit.stage == Stage::Busy) {
            self.settled.wait(&mut state);
        }
        if let Some(why) = state.frozen {
            return Err(Error::Unsupported(why));
        }
        let mut made = state.shadow.covered(range)?;
        let mut bytes = 0;
        made.retain(|unit| match unit.stage {
            Stage::Noted => {
                state.shadow.remove(unit.range);
                bytes += unit.range.len();
                false
            }
            Stage::Made | Stage::Busy => {
                state.shadow.set(unit.range, Stage::Busy);
                true
            }
        });
        Ok((made, bytes))
    }

    /// Ends what [`take`](Self::take) began.
    fn give_back(&self, units: &[Unit], removed: bool) {
        let mut state = self.state.lock();
        for unit in units {
            if removed {
                state.shadow.remove(unit.range);
                state.left.retain(|(left, _)| *left != unit.range);
                state.entries = state.entries.saturating_sub(self.entries(unit.range));
            } else {
                state.shadow.set(unit.range, Stage::Made);
            }
        }
        self.settled.notify_all();
    }

    /// Joins units that touch, up to a chunk: a gap may belong to another mapping by now.
    fn runs<'a>(
        &self,
        units: &'a [Unit],
    ) -> impl Iterator<Item = (Range, &'a [Unit])> + use<'a, B> {
        let chunk = self.tuning.chunk;
        let mut rest = units;
        std::iter::from_fn(move || {
            let mut run = rest.first()?.range;
            let mut count = 1;
            while let Some(next) = rest.get(count)
                && run.touches(next.range)
                && run.hull(next.range).extent() < chunk
            {
                run = run.hull(next.range);
                count += 1;
            }
            let (units, others) = rest.split_at(count);
            rest = others;
            Some((run, units))
        })
    }

    /// What the kernel has in `range`: whole mappings, one or several that follow each other, of a
    /// chunk at most.
    ///
    /// # Errors
    /// [`Error::WouldSplit`].
    fn made_in(&self, range: Range) -> Result<Vec<Range>> {
        let mut units = self.state.lock().shadow.covered(range)?;
        units.retain(|unit| unit.stage == Stage::Made);
        Ok(self.runs(&units).flat_map(|(run, _)| self.pieces(run)).collect())
    }

    /// Removes whole kernel mappings.
    pub(crate) fn remove(&self, piece: Range) -> Result<()> {
        let unmap = &mut || self.backend.unmap(piece.first().0, size(piece));
        self.remove_by(piece, piece.len(), unmap)
    }

    /// Calls `unmap` until nothing is left of a range of which `known` bytes are mapped: if the
    /// kernel reports fewer bytes, some of them may still be there.
    pub(crate) fn remove_by(
        &self,
        range: Range,
        known: u128,
        unmap: &mut dyn FnMut() -> KernelResult<u64>,
    ) -> Result<()> {
        let mut gone = 0_u128;
        for _ in 0..MOST_CALLS {
            let removed = unmap().map_err(|errno| lost("unmap", errno, range))?;
            gone += u128::from(removed);
            if removed == 0 || gone >= known {
                self.compare(known, gone);
                return Ok(());
            }
        }
        Err(Error::Gone("the kernel removes a mapping again and again"))
    }

    /// Compares what the kernel has removed with what was mapped according to the shadow.
    fn compare(&self, known: u128, removed: u128) {
        if known != removed {
            self.mismatches.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(known, removed, "something else changes the address space too");
        }
    }

    /// Waits until no unit is busy, then makes maps and unmaps fail; returns the units.
    pub(crate) fn freeze(&self, why: &'static str) -> Result<Vec<Unit>> {
        let mut state = self.state.lock();
        while state.shadow.iter().any(|unit| unit.stage == Stage::Busy) {
            self.settled.wait(&mut state);
        }
        if let Some(before) = state.frozen {
            return Err(Error::Unsupported(before));
        }
        state.frozen = Some(why);
        Ok(state.shadow.iter().copied().collect())
    }

    /// Ends [`freeze`](Self::freeze); the given units have new targets from now on.
    pub(crate) fn thaw(&self, moved: impl IntoIterator<Item = (Range, HostAddr)>) {
        let mut state = self.state.lock();
        state.frozen = None;
        moved.into_iter().for_each(|(range, target)| state.shadow.retarget(range, target));
    }

    /// The kernel mappings that `unit` consists of, each with its offset in the unit; none if the
    /// kernel does not have it yet.
    pub(crate) fn pieces_of(&self, unit: &Unit) -> impl Iterator<Item = (Range, u64)> + use<B> {
        let first = unit.range.first().0;
        let made = unit.stage != Stage::Noted;
        let pieces = self.pieces(unit.range).map(move |piece| (piece, piece.first().0 - first));
        pieces.filter(move |_| made)
    }
}

/// How many times a kernel may report a partial removal.
const MOST_CALLS: usize = 8;

/// A unit that was not made.
struct Failed {
    error: Error,
    /// Some of it is mapped nevertheless: not all pieces could be undone.
    left: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, left: false }
    }
}

impl State {
    /// Whether a unit could be mapped, as far as that can be checked without the kernel.
    fn check(&self, map: &Map<HostAddr>) -> Result<()> {
        let range = map.range();
        if let Some(why) = self.frozen {
            return Err(Error::Unsupported(why));
        }
        self.geometry.check_map(map)?;
        match self.shadow.overlapping(range) {
            Some(held) => Err(Error::Exists { range, at: held.range.first() }),
            None => Ok(()),
        }
    }
}

fn flags(prot: Prot) -> MapFlags {
    let mut flags = MapFlags::empty();
    flags.set(MapFlags::READ, prot.contains(Prot::READ));
    flags.set(MapFlags::WRITE, prot.contains(Prot::WRITE));
    flags
}

/// The bytes of a piece, which is a chunk at most.
pub(crate) fn size(piece: Range) -> u64 {
    piece.extent() + 1
}
