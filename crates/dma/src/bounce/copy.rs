//! Copying between a buffer and a slot.

use core::ops::Range as Span;

use ringfence_iommu::Address;
use ringfence_mem::{HostSlice, ReadSlice};

use super::{Bounced, Slot, Written};
use crate::{Direction, DmaBuffer};

/// The bytes of a buffer, piece by piece; false if the CPU cannot reach them.
pub(crate) type Slices<'a> = &'a dyn Fn(&mut dyn FnMut(ReadSlice<'_>)) -> bool;
/// The same, for writing.
pub(crate) type SlicesMut<'a> = &'a mut dyn FnMut(&mut dyn FnMut(HostSlice<'_>)) -> bool;

/// How the CPU reaches the bytes that a mapping owns.
#[allow(clippy::type_complexity, reason = "the two methods of a buffer, as they are")]
pub(crate) struct Bytes<B> {
    pub(crate) read: fn(&B, &mut dyn FnMut(ReadSlice<'_>)) -> bool,
    pub(crate) write: fn(&mut B, &mut dyn FnMut(HostSlice<'_>)) -> bool,
}

impl<B> Bytes<B> {
    pub(crate) fn of<T: Address>() -> Bytes<B>
    where
        B: DmaBuffer<T>,
    {
        Bytes { read: B::for_each_slice, write: B::for_each_slice_mut }
    }
}

impl Slot {
    /// The bytes from `at`, for copies. A device may read and write them meanwhile: each byte is
    /// then an old or a new one.
    pub(super) fn piece(&self, at: u64, len: u64) -> HostSlice<'_> {
        debug_assert!(at.checked_add(len).is_some_and(|end| end <= self.range.extent() + 1));
        // SAFETY: the caller keeps `at + len` within the slot, whose memory belongs to this value
        // as long as it lives, and no reference to that memory exists.
        unsafe { HostSlice::new(self.ptr.add(at as usize), len as usize) }
    }

    /// Copies `bytes` of a buffer (offsets) to the same place of the slot. False if the CPU cannot
    /// reach the buffer, or the buffer is shorter than it claimed.
    pub(crate) fn fill(&mut self, bytes: Span<u64>, slices: Slices<'_>) -> bool {
        self.dirty = self.dirty.max(bytes.end);
        let mut copier = Walk { wanted: bytes, at: 0 };
        let reached = slices(&mut |slice| {
            if let Some((skip, at, len)) = copier.step(slice.len() as u64) {
                // `at + len` is at most the end of `bytes`, which the caller keeps within the slot.
                self.piece(at, len).copy_from_piece(slice.part(skip as usize, len as usize));
            }
        });
        reached && copier.at >= copier.wanted.end
    }

    /// Copies `bytes` of the slot to the same place of a buffer; with `scrub`, leaves zeros in the
    /// slot. False as for [`fill`](Self::fill).
    pub(crate) fn bring_back(
        &mut self,
        bytes: Span<u64>,
        scrub: bool,
        slices: SlicesMut<'_>,
    ) -> bool {
        /// How much is copied, then scrubbed, at a time, so that it is still in the nearest cache.
        const PIECE: usize = 4096;
        let mut copier = Walk { wanted: bytes, at: 0 };
        let reached = slices(&mut |slice| {
            if let Some((skip, at, len)) = copier.step(slice.len() as u64) {
                let (to, from) = (slice.part(skip as usize, len as usize), self.piece(at, len));
                for at in (0..len as usize).step_by(PIECE) {
                    let from = from.part(at, PIECE);
                    to.part(at, PIECE).copy_from_piece(from.into());
                    if scrub {
                        from.fill_zero();
                    }
                }
            }
        });
        reached && copier.at >= copier.wanted.end
    }

    /// Writes zeros over `bytes`.
    pub(crate) fn zero(&mut self, bytes: Span<u64>) {
        if bytes.start < bytes.end {
            self.piece(bytes.start, bytes.end - bytes.start).fill_zero();
        }
    }
}

impl Bounced {
    /// Fills the slot with what the device may see, and nothing else: the buffer's bytes, if the
    /// device reads them or may leave some of them unwritten, and zeros. Returns how many bytes
    /// were copied; `None` if the CPU cannot reach the buffer.
    pub(crate) fn load(
        &mut self,
        direction: Direction,
        written: Written,
        slices: Slices<'_>,
    ) -> Option<u64> {
        let (len, dirty) = (self.len, self.slot.dirty);
        if direction == Direction::FromDevice && written == Written::Reported {
            self.slot.zero(0..dirty);
            self.slot.dirty = 0;
            // Checks now that the buffer can be reached, not when its bytes have arrived.
            return slices(&mut |_| ()).then_some(0);
        }
        // What an earlier mapping left behind the buffer's bytes.
        self.slot.zero(len..dirty);
        self.slot.dirty = len;
        self.slot.fill(0..len, slices).then_some(len)
    }

    /// Copies back what the device wrote to `bytes`, for good: bytes that this scrubs are not
    /// brought back again. Returns how many bytes.
    pub(crate) fn note_written(&mut self, bytes: Span<u64>, slices: SlicesMut<'_>) -> u64 {
        self.noted = true;
        let Some(bytes) = self.to_bring_back(bytes) else { return 0 };
        // A range that does not continue the scrubbed part is scrubbed at the end: if it were
        // zeroed now, a later note that includes it would bring back zeros.
        let scrub = self.scrubs() && bytes.start == self.clean;
        if scrub {
            self.clean = bytes.end;
        }
        let len = bytes.end - bytes.start;
        let reached = self.slot.bring_back(bytes, scrub, slices);
        debug_assert!(reached, "it was reached when it was mapped");
        len
    }

    /// The part of `bytes` that is still in the slot: the rest is in the buffer already, and zero
    /// here.
    fn to_bring_back(&self, bytes: Span<u64>) -> Option<Span<u64>> {
        let bytes = bytes.start.max(self.clean)..bytes.end;
        (self.back && !bytes.is_empty()).then_some(bytes)
    }

    /// Copies `bytes` back for the CPU to read. Returns how many bytes.
    pub(crate) fn sync_for_cpu(&mut self, bytes: Span<u64>, slices: SlicesMut<'_>) -> u64 {
        let Some(bytes) = self.to_bring_back(bytes) else { return 0 };
        let len = bytes.end - bytes.start;
        self.slot.bring_back(bytes, false, slices);
        len
    }

    /// Copies `bytes` again for the device to read, or to leave unwritten. Returns how many bytes.
    pub(crate) fn sync_for_device(&mut self, bytes: Span<u64>, slices: Slices<'_>) -> u64 {
        if bytes.is_empty() {
            return 0;
        }
        // Includes the scrubbed bytes behind it, which would otherwise be brought back as zeros
        // later. (The device cannot read them: slots are scrubbed only for devices that cannot.)
        let bytes = bytes.start..bytes.end.max(self.clean);
        let len = bytes.end - bytes.start;
        self.clean = self.clean.min(bytes.start);
        self.slot.fill(bytes, slices);
        len
    }

    /// Whether the slot is left zeroed. Not if the device may read it: then the next copy
    /// overwrites what is there.
    fn scrubs(&self) -> bool {
        self.slot.direction == Direction::FromDevice
    }

    /// Ends the copy: brings back what remains, to `slices` if the buffer is wanted, and leaves the
    /// slot ready for the next mapping. Also returns how many bytes were copied.
    pub(crate) fn finish(mut self, slices: Option<SlicesMut<'_>>) -> (Slot, u64) {
        let mut copied = 0;
        if let Some(slices) = slices
            && self.back
            && !self.noted
        {
            copied = self.note_written(0..self.len, slices);
        }
        if self.scrubs() {
            let clean = self.clean;
            self.slot.zero(clean..self.len.max(clean));
            self.slot.dirty = 0;
        }
        (self.slot, copied)
    }
}

/// Finds the part of each slice of a buffer that lies in a wanted range.
struct Walk {
    wanted: Span<u64>,
    at: u64,
}

impl Walk {
    /// For the next slice, of `len` bytes: where in it to begin, where that lies in the buffer, and
    /// how many bytes are wanted.
    fn step(&mut self, len: u64) -> Option<(u64, u64, u64)> {
        let (first, next) = (self.at, self.at.saturating_add(len));
        self.at = next;
        let (start, end) = (self.wanted.start.max(first), self.wanted.end.min(next));
        (start < end).then(|| (start - first, start, end - start))
    }
}
