//! A kernel that an emulated machine starts at once.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::initramfs;

/// Where a kernel's first page says how many sectors of code for real mode follow it, that its
/// protocol is one that says where the rest is, and where (Linux, Documentation/arch/x86/boot.rst).
const SETUP_SECTORS: usize = 0x1f1;
const MAGIC: usize = 0x202;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LEN: usize = 0x24c;
const SECTOR: usize = 512;

/// Unpacks the kernel that `packed` unpacks by itself when it starts: emulated, that takes a third
/// of a boot. One that is not compressed with zstd, or in a file of another kind, stays as it is.
pub(super) fn unpack(packed: &Path, into: &Path) -> Result<()> {
    let image = fs::read(packed).with_context(|| packed.display().to_string())?;
    let Some(payload) = payload(&image) else {
        fs::copy(packed, into).with_context(|| into.display().to_string())?;
        return Ok(());
    };
    let file = into.with_extension("zst");
    fs::write(&file, payload).with_context(|| file.display().to_string())?;
    fs::write(into, initramfs::unpack(&file)?).with_context(|| into.display().to_string())?;
    Ok(fs::remove_file(file)?)
}

/// What is compressed with zstd in a kernel's file, without the length behind it.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..)?.first_chunk()?;
        usize::try_from(u32::from_le_bytes(*bytes)).ok()
    };
    let sectors = usize::from(*image.get(SETUP_SECTORS)?) + 1;
    let is_kernel = image.get(MAGIC..)?.starts_with(b"HdrS");
    let begin = (sectors * SECTOR).checked_add(word(PAYLOAD_OFFSET)?)?;
    let end = begin.checked_add(word(PAYLOAD_LEN)?)?.checked_sub(4)?;
    image.get(begin..end).filter(|payload| is_kernel && payload.starts_with(b"\x28\xb5\x2f\xfd"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one sector of setup code and a payload after eight bytes.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * SECTOR + 8];
        image[SETUP_SECTORS] = 1;
        image[MAGIC..MAGIC + 4].copy_from_slice(b"HdrS");
        image[PAYLOAD_OFFSET] = 8;
        image[PAYLOAD_LEN] = u8::try_from(payload.len() + 4).unwrap();
        [&image[..], payload, &[1, 2, 3, 4]].concat()
    }

    #[test]
    fn what_a_kernel_unpacks_by_itself_is_found() {
        let packed = b"\x28\xb5\x2f\xfdrest";
        assert_eq!(payload(&image(packed)), Some(&packed[..]));
        // Another compression; a file that is cut, and one that is no kernel.
        assert_eq!(payload(&image(b"\x1f\x8brest")), None);
        let whole = image(packed);
        assert_eq!(payload(&whole[..whole.len() - 5]), None);
        assert_eq!(payload(b"\x7fELF"), None);
    }
}
