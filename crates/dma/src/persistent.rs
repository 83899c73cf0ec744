//! Buffers that stay mapped from one I/O to the next.

use core::{
    fmt,
    ops::{Deref, Range as Bytes},
};

use crate::{Mapping, OutOfBounds, Segment, UnmapError, counter::Count, mapping::Owner};

/// A buffer that is mapped once and used for many I/Os: no I/O needs a request to the IOMMU, and
/// none is protected from another. For buffers that a program registers once anyway (a pool of I/O
/// buffers, an arena).
///
/// As long as it lives the device can reach all of the buffer. Only the caller tracks which parts
/// the device works on. Unmapping and dropping are strict whatever the policy.
#[must_use = "dropping a persistent mapping unmaps it"]
pub struct Persistent<B> {
    mapping: Mapping<B>,
    /// Where each segment begins in the buffer.
    starts: Box<[u64]>,
}

impl<B> Deref for Persistent<B> {
    type Target = Mapping<B>;

    fn deref(&self) -> &Mapping<B> {
        &self.mapping
    }
}

impl<B> Persistent<B> {
    pub(crate) fn new(mapping: Mapping<B>) -> Persistent<B> {
        let start = |sum: &mut u64, segment: &Segment| {
            let start = *sum;
            *sum = sum.saturating_add(segment.len);
            Some(start)
        };
        let starts = mapping.segments().iter().scan(0, start).collect();
        Persistent { mapping, starts }
    }

    /// What to put into descriptors for `bytes` (offsets in the buffer), in their order. Allocates
    /// nothing, and crosses no segment.
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    #[inline]
    pub fn segments_for(
        &self,
        bytes: Bytes<u64>,
    ) -> Result<impl Iterator<Item = Segment> + '_, OutOfBounds> {
        self.mapping.check(bytes.clone())?;
        let first = self.starts.partition_point(|start| *start <= bytes.start).saturating_sub(1);
        let mut skip = bytes.start - self.starts.get(first).copied().unwrap_or(0);
        let mut left = bytes.end - bytes.start;
        Ok(self.segments()[first..].iter().map_while(move |segment| {
            // The bytes lie in the buffer, so that the rest begins in this segment.
            let len = left.min(segment.len - skip);
            let part = Segment { addr: segment.addr + skip, len };
            (left, skip) = (left - len, 0);
            (len > 0).then_some(part)
        }))
    }

    /// Makes what the device wrote to `bytes` visible to the CPU, as [`Mapping::sync_for_cpu`].
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    pub fn sync_for_cpu(&self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        self.mapping.check(bytes)?;
        self.mapping.counters().syncs_for_cpu.add(1);
        Ok(())
    }

    /// Makes what the CPU wrote to `bytes` visible to the device, as [`Mapping::sync_for_device`].
    ///
    /// # Errors
    /// `bytes` do not lie in the buffer.
    pub fn sync_for_device(&self, bytes: Bytes<u64>) -> Result<(), OutOfBounds> {
        self.mapping.check(bytes)?;
        self.mapping.counters().syncs_for_device.add(1);
        Ok(())
    }

    /// The buffer, which the device may access at any time.
    ///
    /// # Safety
    /// The caller touches no part of it that the device works on, does not move the buffer out, and
    /// does not change where its memory lies. A misbehaving device may have written what the caller
    /// reads there at any time: any value must be valid.
    pub unsafe fn buffer_mut(&mut self) -> &mut B {
        self.mapping.buffer_mut()
    }

    /// Takes the buffer back. Always strict: when this returns, the device reaches none of it.
    ///
    /// # Errors
    /// As [`Mapping::unmap`].
    #[track_caller]
    pub fn unmap(mut self) -> Result<B, UnmapError<B>> {
        let bytes = self.len();
        let (buffer, owner, _) = self.mapping.take(true, false)?;
        note_end(&*owner, bytes);
        Ok(buffer)
    }
}

fn note_end(owner: &dyn Owner, bytes: u64) {
    owner.counters().persistent.take_back(1);
    owner.counters().persistent_bytes.take_back(bytes);
}

impl<B> Drop for Persistent<B> {
    fn drop(&mut self) {
        let bytes = self.len();
        // A buffer that cannot be unmapped is still reachable, and still counts.
        if let Some(owner) = self.mapping.take_dropped(true) {
            note_end(&*owner, bytes);
        }
    }
}

impl<B> fmt::Debug for Persistent<B> {
    ringfence_sync::shows!(
        Persistent as it, iova: it.iova(), len: it.len(), segments: it.segments().len()
    );
}
