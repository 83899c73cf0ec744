//! One contiguous chunk for a ring, cut into its buffers.

use core::fmt;

use ringfence_sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{
    Align, AllocError, AllocReason, Allocator, Aperture, Bitmap, FreeError, Request, ReserveError,
    Stats,
};

/// The most granules of a chunk: what a [`Bitmap`] covers, 256 GiB at a granule of 4 KiB.
const MAX_GRANULES: u64 = 1 << 26;

/// Ring-contiguous placement: one chunk of another allocator's addresses for one ring (a queue of a
/// NIC, of an NVMe device), from which all its buffers are cut.
///
/// The chunk is naturally aligned, and buffers are cut from it one after the other, next fit,
/// wrapping around as the ring itself does. So buffers that the device accesses in order lie in
/// order: their tables are few and close together, stay in the IOMMU's page-walk caches, and are
/// not freed and reallocated as buffers come and go. That is the placement of Fast & Safe (SOSP
/// 2024). A descriptor of many pages is one request: it is contiguous, and one ranged invalidation
/// covers it.
///
/// A request that does not fit (the chunk is full, the limit lies below it) goes to the allocator
/// below; [`fallbacks`](Self::fallbacks) counts these. A chunk holds a ring without gaps if its
/// size is that of a buffer, rounded up to the buffer's alignment, times the number in flight.
///
/// Rings that run in lock-step, at the same offset in equally aligned chunks, use the same set of
/// an IOTLB at the same time and evict each other: [`with_lead`](Self::with_lead) avoids that.
///
/// The chunk stays allocated below as long as the ring lives (rule [L9]), and is given back when
/// the ring is dropped. If a buffer in it is still allocated then, or part of it is reserved, it is
/// never given back: addresses that a device may still reach must not be reused.
///
/// Every free of a range within the chunk is checked; the allocator below checks others.
///
/// [L9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l9
pub struct Ring<A: Allocator> {
    inner: A,
    /// Free and taken granules of the chunk without its lead; the window covers exactly that.
    chunk: Bitmap,
    /// The range taken from below: its first and last address, and its size.
    first: u64,
    last: u64,
    size: u64,
    /// Whether part of the chunk was reserved here, unknown to the allocator below.
    reserved: AtomicBool,
    fallbacks: AtomicU64,
    /// Ranges given back below.
    returned: AtomicU64,
    failures: AtomicU64,
    rejected: AtomicU64,
}

impl<A: Allocator> Ring<A> {
    /// A ring with a chunk of `bytes`, rounded up to whole granules, from `inner`.
    ///
    /// # Errors
    /// `inner` has no such range, or the chunk is larger than 2^26 granules
    /// ([`TooBig`](AllocReason::TooBig)).
    pub fn new(inner: A, bytes: u64) -> Result<Self, AllocError> {
        Self::with_lead(inner, bytes, 0)
    }

    /// As [`new`](Self::new), with `lead` bytes, rounded up to whole granules, in front of the
    /// chunk that are never handed out. The chunk is then aligned only to the granule, as the lead
    /// offsets it.
    ///
    /// Rings that are cut with a lead of one granule, one after the other, from a common ring of
    /// their device, each begin in a different set of an IOTLB, and fill their tables without gaps.
    /// Their buffers must be requested with the granule's alignment ([`Align::Bytes`]): alignment
    /// to the size would cancel the offset.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_lead(inner: A, bytes: u64, lead: u64) -> Result<Self, AllocError> {
        let granule = inner.granule();
        let whole = |bytes: u64| bytes.checked_next_multiple_of(granule);
        let too_big = AllocError { request: Request::new(bytes), reason: AllocReason::TooBig };
        let (bytes, lead) = whole(bytes).zip(whole(lead)).ok_or(too_big)?;
        let size = bytes.checked_add(lead).ok_or(too_big)?;
        let align = if lead == 0 { Align::Size } else { Align::Bytes(granule) };
        if bytes / granule > MAX_GRANULES {
            return Err(too_big);
        }
        // A ring of no bytes is invalid, even with a lead.
        let size = if bytes == 0 { 0 } else { size };
        let request = Request::new(size).align(align);
        let first = inner.alloc(&request)?;
        let last = first.saturating_add(size.saturating_sub(1));
        // The range consists of whole granules without IOVA 0, so it makes an aperture.
        let window = Aperture::new(first.saturating_add(lead), last, granule).map_err(|_| {
            AllocError { request, reason: AllocReason::ApertureTooSmall { first, last } }
        })?;
        Ok(Ring {
            chunk: Bitmap::new(window, bytes),
            inner,
            first,
            last,
            size,
            reserved: AtomicBool::new(false),
            fallbacks: AtomicU64::new(0),
            returned: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
        })
    }

    /// The addresses that buffers are cut from: the chunk without its lead.
    pub fn chunk(&self) -> Aperture {
        self.chunk.window()
    }

    /// The allocator below.
    pub fn inner(&self) -> &A {
        &self.inner
    }

    /// Requests that the allocator below served, as the chunk had no place for them.
    pub fn fallbacks(&self) -> u64 {
        self.fallbacks.load(Ordering::Relaxed)
    }

    fn is_in_chunk(&self, iova: u64) -> bool {
        // The lead belongs to the chunk: no caller's range lies in it.
        self.first <= iova && iova <= self.last
    }
}

impl<A: Allocator> Allocator for Ring<A> {
    fn alloc(&self, request: &Request) -> Result<u64, AllocError> {
        let result = match self.chunk.alloc(request) {
            Err(error) if !error.reason.is_invalid() => {
                self.inner.alloc(request).inspect(|_| count(&self.fallbacks))
            }
            result => result,
        };
        result.inspect_err(|_| count(&self.failures))
    }

    fn free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        let result = if self.is_in_chunk(iova) {
            self.chunk.free(iova, size)
        } else {
            self.inner.free(iova, size).inspect(|()| count(&self.returned))
        };
        result.inspect_err(|_| count(&self.rejected))
    }

    /// As in other allocators, with one exception: a range that extends beyond the chunk is
    /// reserved in parts, first the part within the chunk. If a later part fails, earlier ones stay
    /// reserved.
    fn reserve(&self, first: u64, last: u64) -> Result<(), ReserveError> {
        if first > last || last < self.first || first > self.last {
            return self.inner.reserve(first, last);
        }
        let whole = |error| match error {
            ReserveError::InUse { taken, .. } => ReserveError::InUse { first, last, taken },
            other => other,
        };
        let (low, high) = (first.max(self.first), last.min(self.last));
        self.chunk.reserve(low, high).map_err(whole)?;
        self.reserved.store(true, Ordering::Relaxed);
        // Neither overflows if the chunk borders on an end of the address space.
        if first < low {
            self.inner.reserve(first, low - 1).map_err(whole)?;
        }
        if high < last {
            self.inner.reserve(high + 1, last).map_err(whole)?;
        }
        Ok(())
    }

    fn check_free(&self, iova: u64, size: u64) -> Result<(), FreeError> {
        if self.is_in_chunk(iova) {
            self.chunk.check_free(iova, size)
        } else {
            self.inner.check_free(iova, size)
        }
    }

    fn granule(&self) -> u64 {
        self.inner.granule()
    }

    /// The ranges allocated from the chunk count in place of the chunk, which is one range below.
    fn stats(&self) -> Stats {
        let (chunk, below) = (self.chunk.stats(), self.inner.stats());
        Stats {
            allocs: chunk.allocs + self.fallbacks(),
            frees: chunk.frees + self.returned.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            rejected_frees: self.rejected.load(Ordering::Relaxed),
            live_ranges: below.live_ranges.saturating_sub(1) + chunk.live_ranges,
            live_bytes: below.live_bytes.saturating_sub(self.size) + chunk.live_bytes,
            searches: below.searches + chunk.searches,
            search_steps: below.search_steps + chunk.search_steps,
            laps: below.laps + chunk.laps,
            ..below
        }
    }

    fn drain(&self) {
        self.inner.drain();
    }
}

impl<A: Allocator> Drop for Ring<A> {
    fn drop(&mut self) {
        // All reservations and allocations came before, as `&mut self` excludes other users now.
        if self.chunk.stats().live_ranges == 0 && !self.reserved.load(Ordering::Relaxed) {
            let freed = self.inner.free(self.first, self.size);
            debug_assert!(freed.is_ok(), "the chunk was already freed: {freed:?}");
        }
    }
}

impl<A: Allocator> fmt::Debug for Ring<A> {
    ringfence_sync::shows!(Ring as it, chunk: it.chunk(), fallbacks: it.fallbacks());
}

/// Relaxed: a statistic that orders nothing.
fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests;
