//! Where a piece of shared memory lies.

use crate::{MemError, PAGE_SIZE};

/// Where one piece of shared memory lies, as vhost-user's SET_MEM_TABLE describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first guest-physical address.
    pub gpa: u64,
    /// How many bytes.
    pub size: u64,
    /// Its first address in the front end's process.
    pub user_addr: u64,
    /// Where it begins in its file, in bytes.
    pub mmap_offset: u64,
}

impl Region {
    /// Checks what can be checked without the file and without the other regions.
    pub(crate) fn check(&self) -> Result<(), MemError> {
        if self.size == 0 {
            return Err(MemError::Empty);
        }
        // A ring's fields are aligned by their *address*; that they are aligned in this process
        // too follows from all three being page-aligned.
        aligned("guest-physical address", self.gpa)?;
        aligned("user address", self.user_addr)?;
        aligned("mmap offset", self.mmap_offset)?;
        for (what, addr, end) in [
            ("guest-physical address", self.gpa, u64::MAX),
            ("user address", self.user_addr, u64::MAX),
            // A file offset is signed; and leave room to round up to the file's page.
            ("mmap offset", self.mmap_offset, i64::MAX as u64 >> 1),
        ] {
            if addr.checked_add(self.size - 1).is_none_or(|last| last > end) {
                return Err(MemError::Wraps { what, addr, size: self.size });
            }
        }
        Ok(())
    }
}

/// Refuses a value that is not a multiple of the page size.
pub(crate) fn aligned(what: &'static str, value: u64) -> Result<(), MemError> {
    let align = PAGE_SIZE as u64;
    if value.is_multiple_of(align) {
        Ok(())
    } else {
        Err(MemError::Misaligned { what, value, align })
    }
}
