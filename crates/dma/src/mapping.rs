//! Buffers while the device has them.

use core::{
    fmt,
    mem::ManuallyDrop,
    ops::{Deref, Range as Bytes},
    panic::Location,
};
use std::sync::Arc;

use ringfence_iommu::{Iova, Range, Result as DomainResult};
use ringfence_mem::HostSlice;

use crate::{
    OutOfBounds, Segment, SharedMemory, UnmapError,
    bounce::{Bounced, Bytes as Access, SlicesMut, Slot},
    counter::Count,
    flush::{Span, Watch},
    placed::Placed,
    stats::Counters,
};

/// What a mapping needs from its device. A trait object, so that the type of a mapping depends only
/// on the buffer, not on the domain and allocator that made it.
pub(crate) trait Owner: Send + Sync {
    /// Unmaps; the IOVA is freed (or parked, if watched), or on failure quarantined. `at` is the
    /// place in the program that requested it, if there is one.
    fn unmap(
        &self,
        span: Option<Span>,
        strictly: bool,
        watched: bool,
        at: Option<&'static Location<'static>>,
    ) -> DomainResult<Option<Arc<Watch>>>;
    /// Frees an IOVA range that was parked.
    fn free(&self, range: Range);
    /// Ends a mapping that is a copy, and copies back to `slices`, if given. Returns its slot.
    fn end_bounce(&self, bounced: Bounced, slices: Option<SlicesMut<'_>>) -> Slot;
    /// Copies back what the device wrote to `bytes`.
    fn note_written(&self, bounced: &mut Bounced, bytes: Bytes<u64>, slices: SlicesMut<'_>);
    /// Gives back a slot of a mapping that has ended.
    fn give_back_slot(&self, slot: Slot);
    /// Identifies the device.
    fn device_id(&self) -> DeviceId;
    fn now_ns(&self) -> u64;
    fn counters(&self) -> &Counters;
}

/// What an unmap gives back: the buffer, its owner, and the IOVA if it is watched.
type Taken<B> = (B, Arc<dyn Owner>, Option<Arc<Watch>>);

/// Why the buffer is there.
const HELD: &str = "a mapping holds its buffer until it is unmapped";

impl fmt::Debug for dyn Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.device_id().0).finish()
    }
}

/// The address of the state that all clones of a device share: unique among live devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceId(pub(crate) usize);

/// A buffer that a device may access. The mapping is the only owner of the buffer.
///
/// Forgetting a mapping leaks the buffer and leaves it mapped, which is wasteful but safe.
#[must_use = "dropping a mapping unmaps it"]
pub struct Mapping<B> {
    pub(crate) placed: Placed,
    /// `None` once `unmap` has taken it, so that `drop` has nothing left to do.
    held: Option<LiveMapping<B>>,
}

struct LiveMapping<B> {
    buffer: B,
    owner: Arc<dyn Owner>,
    access: Access<B>,
}

impl<B> Mapping<B> {
    pub(crate) fn new(
        buffer: B,
        placed: Placed,
        owner: Arc<dyn Owner>,
        access: Access<B>,
    ) -> Mapping<B> {
        Mapping { placed, held: Some(LiveMapping { buffer, owner, access }) }
    }

    /// Whether the device works on a copy of the buffer, and never reaches the buffer itself.
    pub fn is_bounced(&self) -> bool {
        self.placed.bounced.is_some()
    }

    /// The device's address of the first byte, which keeps the buffer's offset in its granule
    /// (rule [L43]); for a copy, the beginning of its slot. Under policy `off`, the first byte's
    /// target address.
    ///
    /// [L43]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l43
    #[inline]
    pub fn iova(&self) -> Iova {
        self.placed.iova
    }

    /// How many bytes the buffer has.
    #[inline]
    pub fn len(&self) -> u64 {
        self.placed.len
    }

    /// Always false: an empty buffer cannot be mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// What to put into descriptors, in the order of the buffer's bytes.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        &self.placed.segments
    }

    /// As [`segments`](Self::segments), for a part of the buffer only: `bytes` are offsets in the
    /// buffer, clipped to its end.
    pub fn segments_of(&self, bytes: Bytes<u64>) -> impl Iterator<Item = Segment> + Clone + '_ {
        let mut at = 0u64;
        self.segments().iter().filter_map(move |segment| {
            // Within the buffer: its length is the sum of the segments'.
            let (first, next) = (at, at + segment.len);
            at = next;
            let (start, end) = (bytes.start.max(first), bytes.end.min(next));
            (start < end)
                .then(|| Segment { addr: segment.addr + (start - first), len: end - start })
        })
    }

    /// Takes the buffer back from the device. Under a strict policy the device cannot reach it any
    /// more when this returns (rule [L17]); under a lazy one it may for a while (rule [L18]).
    ///
    /// # Errors
    /// The device did not acknowledge the invalidation and may still reach the buffer, which
    /// therefore is not handed back as safe.
    ///
    /// [L17]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l17
    /// [L18]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l18
    #[track_caller]
    pub fn unmap(mut self) -> Result<B, UnmapError<B>> {
        self.take(false, false).map(|(buffer, ..)| buffer)
    }

    /// As [`unmap`](Self::unmap), and hands out the IOVA too, so that the caller can watch for how
    /// long the device still reaches it.
    ///
    /// # Errors
    /// As [`unmap`](Self::unmap).
    #[track_caller]
    pub fn unmap_watched(mut self) -> Result<(B, StaleIova), UnmapError<B>> {
        let (buffer, owner, watch) = self.take(false, true)?;
        let watch = watch.unwrap_or_else(|| Watch::new(owner.now_ns()));
        let placed = self.placed.take();
        Ok((buffer, StaleIova { placed, watch, owner }))
    }

    /// Makes what the device wrote to `bytes` (offsets in the buffer) visible to the CPU: for a
    /// copy, by copying these back, without those that [`note_written`](Self::note_written) has
    /// copied back already.
    ///
    /// All memory that this crate maps is coherent, so that otherwise it only checks and counts.
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    pub fn sync_for_cpu(&mut self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        self.check(bytes.clone())?;
        let Some(LiveMapping { buffer, owner, access }) = &mut self.held else { return Ok(()) };
        let copied = match &mut self.placed.bounced {
            Some(bounced) => bounced.sync_for_cpu(bytes, &mut |each| (access.write)(buffer, each)),
            None => 0,
        };
        owner.counters().syncs_for_cpu.add(1);
        owner.counters().copied_bytes.add(copied);
        Ok(())
    }

    /// Makes what the CPU wrote to `bytes` (offsets in the buffer) visible to the device:
    /// [`sync_for_cpu`](Self::sync_for_cpu) in the other direction.
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    pub fn sync_for_device(&mut self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        self.check(bytes.clone())?;
        let Some(LiveMapping { buffer, owner, access }) = &mut self.held else { return Ok(()) };
        let copied = match &mut self.placed.bounced {
            Some(bounced) => bounced.sync_for_device(bytes, &|each| (access.read)(buffer, each)),
            None => 0,
        };
        owner.counters().syncs_for_device.add(1);
        owner.counters().copied_bytes.add(copied);
        Ok(())
    }

    /// Notes that the device reported to have written `bytes` (offsets in the buffer), and only the
    /// ranges that are noted: for a copy, these are copied back now, and the unmap copies back
    /// nothing else (see [`Written`](crate::Written)).
    ///
    /// A byte is copied back once: what the device writes there later counts only after a
    /// [`sync_for_device`](Self::sync_for_device) of it, as the DMA API requires for any buffer
    /// that goes back to the device. So noted ranges may overlap (a length that grows).
    ///
    /// Do not trust the device: clamp its report to the buffer's length first.
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    pub fn note_written(&mut self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        self.check(bytes.clone())?;
        if let Some(bounced) = &mut self.placed.bounced
            && let Some(LiveMapping { buffer, owner, access }) = &mut self.held
        {
            owner.note_written(bounced, bytes, &mut |each| (access.write)(buffer, each));
        }
        Ok(())
    }

    /// Ends a copy; returns false if it is not one. The buffer gets what the device wrote, if it is
    /// `wanted`; if `watched`, the slot is kept.
    pub(crate) fn end_bounce(&mut self, wanted: bool, watched: bool) -> bool {
        let Some(bounced) = self.placed.bounced.take() else { return false };
        let LiveMapping { buffer, owner, access } = self.held.as_mut().expect(HELD);
        let mut slices = |each: &mut dyn FnMut(HostSlice<'_>)| (access.write)(buffer, each);
        let slot = owner.end_bounce(bounced, wanted.then_some(&mut slices));
        if watched {
            self.placed.slot = Some(slot);
        } else {
            owner.give_back_slot(slot);
        }
        true
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.held.as_ref().expect(HELD).owner.counters()
    }

    pub(crate) fn check(&self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        let Bytes { start, end } = bytes;
        if start <= end && end <= self.len() {
            Ok(())
        } else {
            Err(OutOfBounds { start, end, len: self.len() })
        }
    }

    /// Hands the mapping to a batch of the device `of`, if it belongs to that. Dropping the result
    /// leaks the buffer, as the device may still reach it.
    #[allow(clippy::result_large_err, reason = "it is given back as it came")]
    pub(crate) fn unmapping(self, of: DeviceId) -> Result<ManuallyDrop<Mapping<B>>, Mapping<B>> {
        if self.held.as_ref().expect(HELD).owner.device_id() != of {
            return Err(self);
        }
        Ok(ManuallyDrop::new(self))
    }

    /// The buffer, or an error, once the outcome of its unmap by a batch is known.
    pub(crate) fn give_back(
        mut self,
        unmapped: DomainResult<Option<Arc<Watch>>>,
    ) -> Result<Returned<B>, UnmapError<B>> {
        let held = self.held.take().expect(HELD);
        let (buffer, owner, watch) = self.placed.taken(held, unmapped)?;
        let placed = self.placed.take();
        let stale = watch.map(|watch| StaleIova { placed, watch, owner });
        Ok(Returned { buffer, stale })
    }

    /// Unmaps on behalf of the caller, and leaves the mapping empty.
    #[track_caller]
    pub(crate) fn take(
        &mut self,
        strictly: bool,
        watched: bool,
    ) -> Result<Taken<B>, UnmapError<B>> {
        self.end(strictly, watched, Some(Location::caller()))
    }

    /// Unmaps because the mapping is dropped, without a place in the program. Returns `None` if
    /// nothing was left to unmap, or the device may still reach it.
    pub(crate) fn take_dropped(&mut self, strictly: bool) -> Option<Arc<dyn Owner>> {
        self.held.as_ref()?;
        // The error holds the buffer, and leaks it.
        let (buffer, owner, _) = self.end(strictly, false, None).ok()?;
        drop(buffer);
        Some(owner)
    }

    /// The buffer, which the device may access.
    pub(crate) fn buffer_mut(&mut self) -> &mut B {
        &mut self.held.as_mut().expect(HELD).buffer
    }

    fn end(
        &mut self,
        strictly: bool,
        watched: bool,
        at: Option<&'static Location<'static>>,
    ) -> Result<Taken<B>, UnmapError<B>> {
        // A copy has nothing to unmap, and nothing to wait for.
        if self.end_bounce(at.is_some(), watched) {
            let LiveMapping { buffer, owner, .. } = self.held.take().expect(HELD);
            return Ok((buffer, owner, None));
        }
        // If something below panics, the buffer is leaked rather than freed while mapped.
        let held = ManuallyDrop::new(self.held.take().expect(HELD));
        let unmapped = held.owner.unmap(self.placed.span, strictly, watched, at);
        self.placed.taken(ManuallyDrop::into_inner(held), unmapped)
    }
}

impl Placed {
    /// What an unmap gives back, by its outcome.
    fn taken<B>(
        &self,
        held: LiveMapping<B>,
        unmapped: DomainResult<Option<Arc<Watch>>>,
    ) -> Result<Taken<B>, UnmapError<B>> {
        let LiveMapping { buffer, owner, .. } = held;
        let buffer = ManuallyDrop::new(buffer);
        match unmapped {
            Ok(unmapped) => Ok((ManuallyDrop::into_inner(buffer), owner, unmapped)),
            Err(error) => {
                let span = self.span.expect("only what is mapped can fail to unmap");
                Err(UnmapError { error, quarantined: span.range, buffer })
            }
        }
    }
}

/// A buffer that a batch has unmapped: the device can no longer reach it, or under a lazy policy
/// only until a flush.
#[derive(Debug)]
pub struct Returned<B> {
    /// The buffer.
    pub buffer: B,
    /// Its IOVA, parked, if that was requested
    /// ([`UnmapBatch::push_watched`](crate::UnmapBatch::push_watched)).
    pub stale: Option<StaleIova>,
}

impl<B: SharedMemory> Mapping<B> {
    /// The buffer, for reading while the device works on it.
    pub fn shared(&self) -> &B {
        &self.held.as_ref().expect(HELD).buffer
    }
}

impl<B> Drop for Mapping<B> {
    fn drop(&mut self) {
        self.take_dropped(false);
    }
}

impl<B> fmt::Debug for Mapping<B> {
    ringfence_sync::shows!(Mapping as it, iova: it.iova(), len: it.len(), segments: it.segments());
}

/// Memory that the device and the CPU share as long as this lives.
#[derive(Debug)]
pub struct Coherent<B>(pub(crate) Mapping<B>);

impl<B> Deref for Coherent<B> {
    type Target = Mapping<B>;

    fn deref(&self) -> &Mapping<B> {
        &self.0
    }
}

impl<B> Coherent<B> {
    /// Takes the memory back. Always strict, whatever the policy, as is dropping: it is rare, and
    /// rings are a worthwhile target for an attacker.
    ///
    /// # Errors
    /// As [`Mapping::unmap`].
    #[track_caller]
    pub fn free(mut self) -> Result<B, UnmapError<B>> {
        self.0.take(true, false).map(|(buffer, ..)| buffer)
    }
}

impl<B: SharedMemory> Coherent<B> {
    /// The memory.
    pub fn memory(&self) -> &B {
        self.0.shared()
    }
}

impl<B> Drop for Coherent<B> {
    fn drop(&mut self) {
        self.0.take_dropped(true);
    }
}

/// An IOVA after its unmap, parked: while this lives, no other buffer gets it.
///
/// A probe uses it to measure for how long a device can still reach memory.
#[derive(Debug)]
pub struct StaleIova {
    /// For a copy this includes its slot, which is not reused meanwhile.
    placed: Placed,
    watch: Arc<Watch>,
    owner: Arc<dyn Owner>,
}

impl StaleIova {
    /// The address that the mapping had.
    pub fn iova(&self) -> Iova {
        self.placed.iova
    }

    /// The range that was unmapped, in whole granules; `None` under policy `off`, and for a copy,
    /// whose slot stays mapped.
    pub fn range(&self) -> Option<Range> {
        self.placed.span.map(|span| span.range)
    }

    /// When its translation was removed, by the environment's clock.
    pub fn queued_at_ns(&self) -> u64 {
        self.watch.since_ns
    }

    /// From when on the device could no longer reach it; `None` if it still may. Always `None`
    /// under policy `off`, and for the slot of a copy (whose buffer the device never reached).
    pub fn released_at_ns(&self) -> Option<u64> {
        self.watch.released_at_ns()
    }
}

impl Drop for StaleIova {
    fn drop(&mut self) {
        if let Some(slot) = self.placed.slot.take() {
            self.owner.give_back_slot(slot);
        }
        if self.watch.unwatch()
            && let Some(range) = self.range()
        {
            self.owner.free(range);
        }
    }
}
