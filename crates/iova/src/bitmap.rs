//! stub
use alloc::boxed::Box;

use crate::{AllocError, Allocator, Aperture, FreeError, Request, ReserveError, Stats};

/// The window that a [`Bitmap`] covers unless told otherwise: 4 GiB.
pub const DEFAULT_WINDOW: u64 = 1 << 32;

/// What makes the IOMMU forget every translation; called by a lazy [`Bitmap`] once a lap.
pub trait Flush: Send + Sync {
    /// Returns once nothing that was unmapped before the call can be reached any more.
    ///
    /// # Errors
    /// It failed: nothing may be reused.
    fn flush(&self) -> Result<(), FlushFailed>;
}

/// A flush did not finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the flush failed")]
pub struct FlushFailed;

impl<F: Fn() -> Result<(), FlushFailed> + Send + Sync> Flush for F {
    fn flush(&self) -> Result<(), FlushFailed> {
        self()
    }
}

/// One bit a granule, next fit, over the lowest `window` bytes of an aperture.
pub struct Bitmap {
    _todo: (),
}

impl Bitmap {
    /// A freed range may be used again at once.
    pub fn new(aperture: Aperture, window: u64) -> Bitmap {
        let _ = (aperture, window);
        todo!()
    }

    /// A freed range is used again only after the flush of the next lap (rule L16).
    pub fn lazy(aperture: Aperture, window: u64, flush: Box<dyn Flush>) -> Bitmap {
        let _ = (aperture, window, flush);
        todo!()
    }
}

impl Allocator for Bitmap {
    fn alloc(&self, _: &Request) -> Result<u64, AllocError> {
        todo!()
    }
    fn free(&self, _: u64, _: u64) -> Result<(), FreeError> {
        todo!()
    }
    fn reserve(&self, _: u64, _: u64) -> Result<(), ReserveError> {
        todo!()
    }
    fn is_allocated(&self, _: u64, _: u64) -> bool {
        todo!()
    }
    fn granule(&self) -> u64 {
        todo!()
    }
    fn stats(&self) -> Stats {
        todo!()
    }
}
