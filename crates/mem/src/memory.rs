//! The regions that a front end shared, checked and mapped.
use crate::{HostSlice, MemError, GuestRam};
use std::{os::fd::OwnedFd, sync::Arc};

/// Where one piece of shared memory lies, as vhost-user's SET_MEM_TABLE says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first guest-physical address.
    pub gpa: u64,
    /// How many bytes.
    pub size: u64,
    /// Its first address in the front end's process.
    pub user_addr: u64,
    /// Where it begins in its file.
    pub mmap_offset: u64,
}

/// What a lookup found: the bytes from an address to the end of its region.
#[derive(Clone, Copy, Debug)]
pub struct Found<'m> {
    /// The bytes from the address to the end of the region.
    pub slice: HostSlice<'m>,
    /// Which region, for [`Memory::is_lost`]. Regions are counted in guest-physical order.
    pub region: usize,
}

/// An immutable set of mapped regions.
#[derive(Debug)]
pub struct Memory {}

impl Memory {
    /// Most regions that one memory holds.
    pub const MAX_REGIONS: usize = 509;

    /// Checks and maps regions.
    ///
    /// # Errors
    /// See [`MemError`].
    pub fn map(regions: Vec<(Region, OwnedFd)>) -> Result<Arc<Memory>, MemError> {
        let _ = regions;
        todo!()
    }
    /// A second mapping of memory that this process made itself.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn of_ram(ram: &GuestRam) -> Result<Arc<Memory>, MemError> {
        let _ = ram;
        todo!()
    }
    /// This memory and one region more.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn with(&self, region: Region, fd: OwnedFd) -> Result<Arc<Memory>, MemError> {
        let _ = (region, fd);
        todo!()
    }
    /// This memory without one of its regions.
    ///
    /// # Errors
    /// [`MemError::NoSuchRegion`].
    pub fn without(&self, region: &Region) -> Result<Arc<Memory>, MemError> {
        let _ = region;
        todo!()
    }
    /// The regions, in guest-physical order.
    pub fn regions(&self) -> impl ExactSizeIterator<Item = &Region> {
        [].iter()
    }
    /// Whether every region's file is sealed against truncation.
    pub fn is_sealed(&self) -> bool {
        todo!()
    }
    /// The bytes from a guest-physical address to the end of its region.
    pub fn find_gpa(&self, gpa: u64) -> Option<Found<'_>> {
        let _ = gpa;
        todo!()
    }
    /// The bytes from an address of the front end's process to the end of its region.
    pub fn find_user(&self, addr: u64) -> Option<Found<'_>> {
        let _ = addr;
        todo!()
    }
    /// The guest-physical address of an address of the front end's process.
    pub fn user_to_gpa(&self, addr: u64) -> Option<u64> {
        let _ = addr;
        todo!()
    }
    /// Whether any region's file was truncated under us. One load as long as none ever was.
    pub fn lost(&self) -> bool {
        todo!()
    }
    /// Whether this region's file was truncated under us.
    pub fn is_lost(&self, region: usize) -> bool {
        let _ = region;
        todo!()
    }
}
