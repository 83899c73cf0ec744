//! Mapped memory by address.

use core::ptr::NonNull;
use std::{any::Any, sync::Arc};

use crate::{Access, AccessError, HostSlice, Window};

/// What a lookup found: the bytes from an address to the end of its region.
#[derive(Clone, Copy, Debug)]
pub struct Found<'m> {
    /// The bytes from the address to the end of the region.
    pub slice: HostSlice<'m>,
    /// Which region: [`Span::region`]. Those of a [`Memory`](crate::Memory) are counted from 0, in
    /// guest-physical order.
    pub region: usize,
}

/// A region as one address space sees it.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Its first address.
    pub first: u64,
    /// Its last address.
    pub last: u64,
    /// Where its first byte lies in this process.
    pub base: NonNull<u8>,
    /// Which region it is, by the caller's count.
    pub region: usize,
}

/// The regions in the order of one address space; they do not overlap.
#[derive(Debug)]
pub struct Spans(Box<[Span]>);

impl Spans {
    /// Regions that do not overlap, in any order.
    ///
    /// # Safety
    /// As long as the value is used, the bytes of each are mapped where it says, and nothing makes
    /// references to them.
    pub unsafe fn new(mut spans: Vec<Span>) -> Spans {
        spans.sort_unstable_by_key(|span| span.first);
        Spans(spans.into())
    }

    /// The regions, in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Span> {
        self.0.iter()
    }

    /// The region with `addr`.
    #[inline]
    pub fn span(&self, addr: u64) -> Option<&Span> {
        // Most memories are one region.
        let index = match &*self.0 {
            [_] => 0,
            spans => spans.partition_point(|span| span.last < addr),
        };
        self.0.get(index).filter(|span| span.first <= addr && addr <= span.last)
    }

    /// The bytes from `addr` to the end of its region.
    #[inline]
    pub fn find(&self, addr: u64) -> Option<Found<'_>> {
        let span = self.span(addr)?;
        let offset = addr - span.first;
        let len = span.last - addr + 1;
        // SAFETY: `offset` is less than the region's size, and the region is mapped from `base`, as
        // the caller of `new` guaranteed.
        let slice = unsafe { HostSlice::new(span.base.add(offset as usize), len as usize) };
        Some(Found { slice, region: span.region })
    }

    /// The `len` bytes at `addr`, if they lie in one region; `None` also of no bytes.
    #[inline]
    pub fn piece(&self, addr: u64, len: u64) -> Option<Found<'_>> {
        let Found { slice, region } = self.find(addr)?;
        let inside = len.wrapping_sub(1) < slice.len() as u64;
        inside.then(|| Found { slice: slice.part(0, len as usize), region })
    }

    /// Calls `each` with every piece of the `len` bytes at `addr`; it may refuse.
    ///
    /// # Errors
    /// What `each` returns; some of the bytes lie in no region, or past the last address.
    #[inline]
    pub fn walk<'m>(
        &'m self,
        addr: u64,
        len: u64,
        access: Access,
        mut each: impl FnMut(Found<'m>, u64) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        let last = addr.checked_add(len - 1).ok_or(AccessError::Overflow { addr, len })?;
        let mut at = addr;
        loop {
            // Only the first lookup is common: regions that touch are rare.
            let found = self.find(at).ok_or(AccessError::OutsideMemory { addr: at, access })?;
            let part = found
                .slice
                .part(0, usize::try_from(last - at).unwrap_or(usize::MAX).saturating_add(1));
            let part_last = at + (part.len() as u64 - 1);
            each(Found { slice: part, region: found.region }, at)?;
            if part_last >= last {
                return Ok(());
            }
            at = part_last + 1;
        }
    }

    /// The `len` bytes at `addr`, for as long as `keep` lives, and the region that has them.
    ///
    /// # Errors
    /// As [`walk`](Self::walk), and of no bytes as of one; they lie in several regions.
    ///
    /// # Safety
    /// The regions stay as [`new`](Self::new) demands for as long as `keep` lives, too.
    pub unsafe fn window(
        &self,
        addr: u64,
        len: u64,
        access: Access,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<(Window, usize), AccessError> {
        let bytes = usize::try_from(len).map_err(|_| AccessError::Overflow { addr, len })?;
        // An empty window still needs an address that leads somewhere.
        let some = len.max(1);
        let Some(found) = self.piece(addr, some) else {
            self.walk(addr, some, access, |_, _| Ok(()))?;
            return Err(AccessError::Fragmented { addr, len });
        };
        let base = NonNull::new(found.slice.as_ptr()).expect("a slice has an address");
        // SAFETY: the bytes (at least `bytes`: one piece covers them) stay mapped while `keep` lives;
        // nothing makes references to them.
        Ok((unsafe { Window::new(base, bytes, keep) }, found.region))
    }
}
