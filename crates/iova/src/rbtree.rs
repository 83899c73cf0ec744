//! stub
use crate::{AllocError, Allocator, Aperture, FreeError, Request, ReserveError, Stats};

/// A red-black tree of the ranges that are taken, searched from the top down.
pub struct RbTree {
    _todo: (),
}

impl RbTree {
    /// Everything in `aperture` is free.
    pub fn new(aperture: Aperture) -> RbTree {
        let _ = aperture;
        todo!()
    }
}

impl Allocator for RbTree {
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
