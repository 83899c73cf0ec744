//! Files in memory, fields of `/proc`, the size of the heap.

use std::{fs, os::fd::OwnedFd};

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// A file of so many bytes in memory, of which no page is present until it is touched.
///
/// # Errors
/// The system refused.
pub(crate) fn file(name: &str, len: u64) -> Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC).context("a file in memory")?;
    ftruncate(&file, len).with_context(|| format!("a file of {len} bytes"))?;
    Ok(file)
}

/// A field of a file in `/proc`: what follows its name and a colon.
pub(crate) fn field(path: &str, word: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let after_colon =
        |line: &str| Some(line.strip_prefix(word)?.trim_start().strip_prefix(':')?.to_owned());
    text.lines().find_map(after_colon).map(|value| value.trim().to_owned())
}

/// The number that such a field begins with.
pub(crate) fn number(path: &str, word: &str) -> Option<u64> {
    field(path, word)?.split_ascii_whitespace().next()?.parse().ok()
}

/// Bytes that the heap holds for the program now; `None` if the C library does not report it.
pub(crate) fn heap() -> Option<u64> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: it takes nothing and returns a plain structure.
        let info = unsafe { libc::mallinfo2() };
        // The used part of the heaps, and mappings for large blocks.
        Some((info.uordblks + info.hblkhd) as u64)
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heap_grows_by_what_is_allocated() {
        let Some(before) = heap() else { return };
        // Never touched, so it takes no memory; larger than what other tests may free meanwhile.
        let block = std::hint::black_box(vec![0u8; 1 << 30]);
        assert!(heap().unwrap() >= before + (1 << 29));
        drop(block);
    }
}
