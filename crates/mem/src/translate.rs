//! Reaching memory by addresses that need no IOMMU.
use crate::{Access, AccessError, HostSlice, Memory, Translate, Window};
use std::sync::Arc;

/// Reaches memory by guest-physical address. One per worker thread; Send.
#[derive(Debug)]
pub struct Physical(Arc<Memory>);
/// Reaches memory by address of the front end's process (ring addresses without an IOMMU).
#[derive(Debug)]
pub struct UserAddresses(Arc<Memory>);

impl Physical {
    /// Reaches `memory`.
    pub fn new(memory: Arc<Memory>) -> Physical {
        Physical(memory)
    }
    /// The memory that it reaches.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0
    }
}
impl UserAddresses {
    /// Reaches `memory`.
    pub fn new(memory: Arc<Memory>) -> UserAddresses {
        UserAddresses(memory)
    }
    /// The memory that it reaches.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0
    }
}
impl Translate for Physical {
    fn slices<F>(&self, _: u64, _: u64, _: Access, _: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        todo!()
    }
    fn window(&self, _: u64, _: u64, _: Access) -> Result<Window, AccessError> {
        todo!()
    }
}
impl Translate for UserAddresses {
    fn slices<F>(&self, _: u64, _: u64, _: Access, _: F) -> Result<(), AccessError>
    where
        F: FnMut(HostSlice<'_>),
    {
        todo!()
    }
    fn window(&self, _: u64, _: u64, _: Access) -> Result<Window, AccessError> {
        todo!()
    }
}
