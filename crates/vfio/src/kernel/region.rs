//! A part of a device, reached by system calls.

use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};

use crate::error::{Error, Result};

/// A part of a device that is read and written by system calls, one register at a time.
#[derive(Clone, Debug)]
pub struct Region {
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    size: u64,
}

impl Region {
    /// `size` bytes at `offset` of a device's file.
    pub(super) fn new(file: Arc<File>, offset: u64, size: u64) -> Region {
        Region { file, offset, size }
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The part of `len` bytes at `at`.
    ///
    /// # Errors
    /// It does not lie in the region.
    pub fn part(&self, at: u64, len: u64) -> Result<Region> {
        let offset = self.place(at, len)?;
        Ok(Region { file: Arc::clone(&self.file), offset, size: len })
    }

    /// Reads the register of `N` bytes at `at`.
    ///
    /// # Errors
    /// It does not lie in the region, or the device does not respond.
    pub fn read<const N: usize>(&self, at: u64) -> Result<[u8; N]> {
        let place = self.place(at, N as u64)?;
        let mut value = [0; N];
        self.file.read_exact_at(&mut value, place).map_err(|error| failed("read", at, error))?;
        Ok(value)
    }

    /// Writes the register of `N` bytes at `at`.
    ///
    /// # Errors
    /// It does not lie in the region, or the device does not respond.
    pub fn write<const N: usize>(&self, at: u64, value: [u8; N]) -> Result<()> {
        let place = self.place(at, N as u64)?;
        self.file.write_all_at(&value, place).map_err(|error| failed("write", at, error))
    }

    /// Where the `len` bytes at `at` lie in the file.
    fn place(&self, at: u64, len: u64) -> Result<u64> {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.size);
        if !inside {
            let operation = format!("reach {len} bytes at {at:#x} of a region of {:#x}", self.size);
            return Err(Error::new(operation));
        }
        Ok(self.offset + at)
    }
}

fn failed(what: &str, at: u64, error: io::Error) -> Error {
    Error::new(format!("{what} the register at {at:#x}")).because(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_lie_within_their_region() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x3000).unwrap();
        let region = Region::new(Arc::new(file), 0x1000, 0x1000);
        region.write(0xffc, [1, 2, 3, 4]).unwrap();
        assert_eq!(region.read(0xffc).unwrap(), [1, 2, 3, 4]);
        for at in [0xffd, 0x1000, u64::MAX, u64::MAX - 3] {
            assert!(region.read::<4>(at).is_err());
            assert!(region.write(at, [0; 4]).is_err());
        }
        let part = region.part(0xff0, 0x10).unwrap();
        assert_eq!(part.read(0xc).unwrap(), [1, 2, 3, 4]);
        assert!(part.read::<4>(0x10).is_err());
        assert!(region.part(0xff0, 0x11).is_err() && region.part(1, u64::MAX).is_err());
    }
}
