//! Memory that this process makes and shares.
use crate::{HostSlice, MemError, Region, Window};
use std::{
    os::fd::BorrowedFd,
    sync::Arc,
};

/// Guest memory, made and owned by this process: a sealed memory file, mapped.
#[derive(Debug)]
pub struct GuestRam {}

impl GuestRam {
    /// Makes memory of `len` bytes (a multiple of the page size) that begins at guest-physical `gpa`.
    ///
    /// # Errors
    /// See [`MemError`].
    pub fn new(len: usize, gpa: u64) -> Result<Arc<GuestRam>, MemError> {
        let _ = (len, gpa);
        todo!()
    }
    /// The file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
    /// The first guest-physical address.
    pub fn gpa(&self) -> u64 {
        todo!()
    }
    /// How many bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        todo!()
    }
    /// The first address in this process.
    pub fn user_addr(&self) -> u64 {
        todo!()
    }
    /// What SET_MEM_TABLE says about this memory.
    pub fn region(&self) -> Region {
        todo!()
    }
    /// A lasting view of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`MemError::OutOfBounds`].
    pub fn window(self: &Arc<Self>, offset: usize, len: usize) -> Result<Window, MemError> {
        let _ = (offset, len);
        todo!()
    }
    /// The `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`MemError::OutOfBounds`].
    pub fn slice(&self, offset: usize, len: usize) -> Result<HostSlice<'_>, MemError> {
        let _ = (offset, len);
        todo!()
    }
    /// Sets `len` bytes aside, for good, and returns their offset, a multiple of `align` (a power
    /// of two). Thread-safe.
    ///
    /// # Errors
    /// [`MemError::Full`].
    pub fn carve(&self, len: usize, align: usize) -> Result<usize, MemError> {
        let _ = (len, align);
        todo!()
    }
    /// Maps pages of this memory (`frames`: their offsets, in any order) once more, into one
    /// contiguous span of this process's addresses.
    ///
    /// # Errors
    /// See [`MemError`].
    pub fn scattered(self: &Arc<Self>, frames: &[u64]) -> Result<ScatteredView, MemError> {
        let _ = frames;
        todo!()
    }
}

/// Pages of a [`GuestRam`], contiguous for the CPU, scattered in guest-physical addresses.
#[derive(Debug)]
pub struct ScatteredView {}

impl ScatteredView {
    /// How many bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        todo!()
    }
    /// All bytes, to copy from and to.
    pub fn slice(&self) -> HostSlice<'_> {
        todo!()
    }
    /// The guest-physical address of the byte at `offset`; `None` past the end.
    pub fn gpa_of(&self, offset: usize) -> Option<u64> {
        let _ = offset;
        todo!()
    }
    /// Calls `each` with (guest-physical address, length) of every contiguous run of the `len`
    /// bytes at `offset`, in order, neighbours merged.
    ///
    /// # Errors
    /// [`MemError::OutOfBounds`]: nothing was visited.
    pub fn runs(&self, offset: usize, len: usize, each: impl FnMut(u64, u64)) -> Result<(), MemError> {
        let _ = (offset, len, each);
        todo!()
    }
    /// The memory that the pages belong to.
    pub fn ram(&self) -> &Arc<GuestRam> {
        todo!()
    }
}
