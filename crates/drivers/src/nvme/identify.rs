//! The Identify data of a controller and its namespaces (NVMe 1.4, section 5.15).

use super::Error;

/// Bytes of Identify data.
pub(super) const BYTES: usize = 4096;

/// A controller's identity, as it reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// The serial number.
    pub serial: String,
    /// The model.
    pub model: String,
    /// The version of its firmware.
    pub firmware: String,
    /// How many bytes a command moves at most, as reported; `None`: no limit.
    pub max_transfer: Option<u64>,
    /// Whether it has a cache that a flush empties.
    pub volatile_cache: bool,
    /// Whether blocks can be deallocated.
    pub deallocates: bool,
}

impl Identity {
    /// Parses Identify data: any bytes are valid.
    pub(super) fn parse(page: &[u8; BYTES]) -> Identity {
        let text = |bytes: &[u8]| {
            // Replace anything but printable ASCII.
            let clean = |&byte: &u8| if (0x20..0x7f).contains(&byte) { byte as char } else { '?' };
            bytes.iter().map(clean).collect::<String>().trim_end().to_owned()
        };
        // In units of the smallest page, 4 KiB.
        let max_transfer = match u32::from(page[77]) {
            0 => None,
            shift => 4096_u64.checked_shl(shift).filter(|bytes| bytes >> shift == 4096),
        };
        Identity {
            serial: text(&page[4..24]),
            model: text(&page[24..64]),
            firmware: text(&page[64..72]),
            max_transfer,
            volatile_cache: page[525] & 1 != 0,
            deallocates: u16::from_le_bytes([page[520], page[521]]) & 4 != 0,
        }
    }
}

/// Parses a list of active namespaces: ascending ids, and zeros after the last.
///
/// # Errors
/// They do not ascend.
pub(super) fn list(page: &[u8; BYTES]) -> Result<Vec<u32>, Error> {
    let (words, _) = page.as_chunks::<4>();
    let ids: Vec<u32> =
        words.iter().map(|word| u32::from_le_bytes(*word)).take_while(|&id| id != 0).collect();
    match ids.is_sorted_by(|a, b| a < b) {
        true => Ok(ids),
        false => Err(Error::Nonsense("namespace ids that do not ascend")),
    }
}

/// A namespace: blocks by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    pub(super) id: u32,
    pub(super) blocks: u64,
    pub(super) shift: u32,
}

impl Namespace {
    /// Its number at the controller.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// How many blocks it has.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Bytes of a block: 512 to 65,536, a power of two.
    pub fn block_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// Parses Identify data; `None` if the namespace does not exist, or its blocks cannot be used:
    /// they have metadata, or an impossible size.
    pub(super) fn parse(id: u32, page: &[u8; BYTES]) -> Option<Namespace> {
        let (longs, _) = page.as_chunks::<8>();
        let blocks = u64::from_le_bytes(longs[0]);
        // The format's number has four bits, so that its entry lies within the page.
        let format = usize::from(page[26] & 0xf);
        let (words, _) = page[128..192].as_chunks::<4>();
        let [metadata, more_metadata, shift, _] = words[format];
        let usable = blocks > 0
            && (metadata, more_metadata) == (0, 0)
            && (9..=16).contains(&shift)
            && blocks.leading_zeros() >= shift.into();
        usable.then_some(Namespace { id, blocks, shift: shift.into() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_controller_and_a_namespace_are_read() {
        let mut page = [0; BYTES];
        page[4..24].copy_from_slice(b"serial-1            ");
        page[24..64].copy_from_slice(b"a disk\x07                                 ");
        page[77] = 5;
        page[520] = 4;
        page[525] = 1;
        let identity = Identity::parse(&page);
        assert_eq!((identity.serial.as_str(), identity.model.as_str()), ("serial-1", "a disk?"));
        assert_eq!(identity.max_transfer, Some(128 << 10));
        assert!(identity.volatile_cache && identity.deallocates);
        // A limit beyond the address space is none.
        page[77] = 255;
        assert_eq!(Identity::parse(&page).max_transfer, None);

        let mut page = [0; BYTES];
        page[..8].copy_from_slice(&1000_u64.to_le_bytes());
        page[26] = 2;
        page[128 + 2 * 4 + 2] = 12;
        let namespace = Namespace::parse(1, &page).unwrap();
        assert_eq!((namespace.blocks(), namespace.block_bytes()), (1000, 4096));
        page[128 + 2 * 4] = 8;
        assert_eq!(Namespace::parse(1, &page), None, "metadata");
        page[128 + 2 * 4] = 0;
        page[0..8].fill(0xff);
        assert_eq!(Namespace::parse(1, &page), None, "more bytes than there are");
    }

    #[test]
    fn a_list_ends_and_ascends() {
        let mut page = [0; BYTES];
        assert_eq!(list(&page), Ok(vec![]));
        page[0] = 1;
        page[4] = 3;
        page[12] = 9;
        assert_eq!(list(&page), Ok(vec![1, 3]));
        page[8] = 3;
        assert!(list(&page).is_err());
    }

    proptest! {
        #[test]
        fn any_identify_data_is_parsed(seed in prop::collection::vec(any::<u8>(), 1..200)) {
            let mut page = [0; BYTES];
            page.iter_mut().zip(seed.iter().cycle()).for_each(|(byte, with)| *byte = *with);
            let identity = Identity::parse(&page);
            prop_assert!(identity.max_transfer.is_none_or(|bytes| bytes >= 8192));
            if let Some(namespace) = Namespace::parse(1, &page) {
                prop_assert!(namespace.blocks().checked_mul(namespace.block_bytes()).is_some());
            }
            let _ = list(&page);
        }
    }
}
