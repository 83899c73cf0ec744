//! One request of a block device, from the chain to its status.

use ringfence_mem::{Access, AccessError, Translate};
use ringfence_virtq::{Chain, Desc, cut};
use zerocopy::FromBytes;

use super::wire::{HEADER_BYTES, Header, ID_BYTES, Kind, SECTOR, Status};
use crate::disk::Ram;

/// What a chain asks for, checked against the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Move `len` bytes between the disk at `offset` and the data of the chain.
    Transfer {
        /// To the disk, rather than from it.
        write: bool,
        /// Where on the disk, in bytes.
        offset: u64,
        /// How many bytes: a multiple of the sector size.
        len: u64,
    },
    /// Make what was written durable.
    Flush,
    /// Tell the name of the disk.
    Identify,
}

/// Reads the header of a chain and checks it against a disk of `capacity` bytes.
///
/// # Errors
/// The status to answer.
pub fn parse(chain: &Chain, mem: &impl Translate, capacity: u64) -> Result<Action, Status> {
    let mut bytes = [0; HEADER_BYTES];
    match chain.read_at(mem, 0, &mut bytes) {
        Ok(HEADER_BYTES) => {}
        Ok(_) | Err(_) => return Err(Status::IoErr),
    }
    let header = Header::read_from_bytes(&bytes).expect("the array has the header's size");
    let (write, len) = match Kind::from_code(header.kind.get()).ok_or(Status::Unsupported)? {
        Kind::Flush => return Ok(Action::Flush),
        Kind::GetId => return Ok(Action::Identify),
        // Of what the device writes, the last byte is the status.
        Kind::In => (false, chain.writable_len().saturating_sub(1)),
        Kind::Out => (true, chain.readable_len() - HEADER_BYTES as u64),
    };
    let offset = header.sector.get().checked_mul(SECTOR).ok_or(Status::IoErr)?;
    let fits = offset.checked_add(len).is_some_and(|end| end <= capacity);
    if !len.is_multiple_of(SECTOR) || !fits {
        return Err(Status::IoErr);
    }
    Ok(Action::Transfer { write, offset, len })
}

/// The buffers of a transfer's data, without header and status.
pub fn data(chain: &Chain, write: bool, len: u64) -> impl Iterator<Item = Desc> + '_ {
    match write {
        true => cut(chain.readable(), HEADER_BYTES as u64, len),
        false => cut(chain.writable(), 0, len),
    }
}

/// Moves the data of a transfer between memory and a disk in memory.
///
/// # Errors
/// An address cannot be reached; what came before it was moved.
pub fn transfer(
    chain: &Chain,
    mem: &impl Translate,
    ram: &Ram,
    write: bool,
    offset: u64,
    len: u64,
) -> Result<(), AccessError> {
    let mut at = offset;
    for desc in data(chain, write, len) {
        let access = if write { Access::Read } else { Access::Write };
        mem.slices(desc.addr, desc.len.into(), access, |piece| {
            if write {
                ram.write(at, piece);
            } else {
                ram.read(at, piece);
            }
            at += piece.len() as u64;
        })?;
    }
    Ok(())
}

/// Writes the name of the disk, as far as there is room; returns how many bytes.
///
/// # Errors
/// The buffer cannot be reached.
pub fn identify(chain: &Chain, mem: &impl Translate, name: &str) -> Result<u32, AccessError> {
    let mut id = [0; ID_BYTES];
    let len = name.len().min(ID_BYTES);
    id[..len].copy_from_slice(&name.as_bytes()[..len]);
    let room = chain.writable_len().saturating_sub(1).min(ID_BYTES as u64) as usize;
    chain.write_at(mem, 0, &id[..room]).map(|done| done as u32)
}

/// Writes the status byte and returns the used length: what was written, the status included, or
/// 0 if not even the status could be.
pub fn answer(chain: &Chain, mem: &impl Translate, status: Status, written: u32) -> u32 {
    let Some(last) = chain.writable_len().checked_sub(1) else { return 0 };
    match chain.write_at(mem, last, &[status.code()]) {
        Ok(1) => written.saturating_add(1),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ringfence_virtq::{device, driver, testing::Ram as Memory};
    use zerocopy::IntoBytes;

    const CAPACITY: u64 = 64 * SECTOR;
    const BUFFERS: u64 = 0x1_0000;

    /// Passes a chain of these buffers through a ring.
    fn chain(mem: &Memory, descs: &[Desc]) -> Chain {
        let (mut driver, mut device): (driver::Queue, device::Queue) =
            ringfence_virtq::testing::pair(mem, mem.base(), 16, false);
        driver.add(descs, 0).unwrap();
        driver.publish();
        let mut chain = Chain::new();
        assert!(device.pop(mem, &mut chain).unwrap());
        chain
    }

    fn memory() -> Memory {
        Memory::new(0, 2 * BUFFERS as usize)
    }

    fn header(mem: &Memory, kind: u32, sector: u64) -> Desc {
        let header = Header { kind: kind.into(), reserved: 7.into(), sector: sector.into() };
        mem.write(BUFFERS, header.as_bytes()).unwrap();
        Desc::readable(BUFFERS, HEADER_BYTES as u32)
    }

    /// A request of one buffer, checked.
    fn parsed(kind: u32, sector: u64, len: u32) -> Result<Action, Status> {
        let mem = memory();
        let header = header(&mem, kind, sector);
        let write = kind == Kind::In.code();
        let data = Desc { addr: BUFFERS + 0x1000, len, write };
        let status = Desc::writable(BUFFERS + 0x800, 1);
        parse(&chain(&mem, &[header, data, status]), &mem, CAPACITY)
    }

    #[test]
    fn a_transfer_lies_on_the_disk_or_is_refused() {
        let whole = CAPACITY as u32;
        let read = Action::Transfer { write: false, offset: 0, len: CAPACITY };
        assert_eq!(parsed(0, 0, whole), Ok(read));
        let write = Action::Transfer { write: true, offset: 63 * SECTOR, len: SECTOR };
        assert_eq!(parsed(1, 63, 512), Ok(write));
        for (sector, len) in [
            (1, whole),
            (64, 512),
            (0, whole + 512),
            (0, 511),
            (u64::MAX, 512),
            (u64::MAX / SECTOR, 512),
            (1 << 55, 512),
        ] {
            for kind in [0, 1] {
                assert_eq!(parsed(kind, sector, len), Err(Status::IoErr), "{sector} {len}");
            }
        }
        // Nothing at the very end is still on the disk.
        assert!(parsed(0, 64, 0).is_ok() && parsed(0, 65, 0).is_err());
    }

    #[test]
    fn what_moves_no_data_is_not_checked_against_the_disk() {
        assert_eq!(parsed(4, u64::MAX, 3), Ok(Action::Flush));
        assert_eq!(parsed(8, u64::MAX, 3), Ok(Action::Identify));
        for unknown in [2, 3, 5, 11, 13, u32::MAX] {
            assert_eq!(parsed(unknown, 0, 512), Err(Status::Unsupported));
        }
    }

    #[test]
    fn a_header_in_pieces_is_a_header_and_a_part_of_one_is_none() {
        let mem = memory();
        header(&mem, 4, 0);
        let status = Desc::writable(BUFFERS + 0x800, 1);
        let pieces = [
            Desc::readable(BUFFERS, 1),
            Desc::readable(BUFFERS + 1, 0),
            Desc::readable(BUFFERS + 1, 15),
            status,
        ];
        assert_eq!(parse(&chain(&mem, &pieces), &mem, CAPACITY), Ok(Action::Flush));
        let short = chain(&mem, &[Desc::readable(BUFFERS, 15), status]);
        assert_eq!(parse(&short, &mem, CAPACITY), Err(Status::IoErr));
        let none = chain(&mem, &[status]);
        assert_eq!(parse(&none, &mem, CAPACITY), Err(Status::IoErr));
        let lost = chain(&mem, &[Desc::readable(1 << 40, 16), status]);
        assert_eq!(parse(&lost, &mem, CAPACITY), Err(Status::IoErr));
    }

    #[test]
    fn the_status_is_the_last_byte_that_can_be_written() {
        let mem = memory();
        let header = header(&mem, 0, 0);
        let at = BUFFERS + 0x1000;
        let request = chain(&mem, &[header, Desc::writable(at, 512), Desc::writable(at + 512, 9)]);
        assert_eq!(answer(&request, &mem, Status::Unsupported, 512), 513);
        let mut bytes = [0xff; 9];
        mem.read(at + 512, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 2]);
        // Without a place for it nothing was done, as far as the driver is told.
        let nowhere = chain(&mem, &[header, Desc::writable(1 << 40, 1)]);
        assert_eq!(answer(&nowhere, &mem, Status::Ok, 0), 0);
        let readable = chain(&mem, &[header]);
        assert_eq!(answer(&readable, &mem, Status::Ok, 0), 0);
    }

    #[test]
    fn the_name_is_cut_to_the_room_there_is() {
        let mem = memory();
        let header = header(&mem, 8, 0);
        let at = BUFFERS + 0x1000;
        for (room, written) in [(0, 0), (5, 5), (20, 20), (100, 20)] {
            mem.write(at, &[0xff; 101]).unwrap();
            let request = chain(&mem, &[header, Desc::writable(at, room + 1)]);
            assert_eq!(identify(&request, &mem, "a name of more than twenty"), Ok(written));
            let mut bytes = [0; 101];
            mem.read(at, &mut bytes).unwrap();
            assert_eq!(bytes[..written as usize], b"a name of more than "[..written as usize]);
            assert!(bytes[written as usize..].iter().all(|&byte| byte == 0xff));
        }
    }

    proptest! {
        #[test]
        fn no_chain_makes_a_request_that_leaves_the_disk(
            kind in 0..3u32,
            sector in prop_oneof![0..80u64, any::<u64>()],
            lens in proptest::collection::vec((0..2000u32, any::<bool>()), 0..8),
            cut in 0..20u32,
        ) {
            let mem = memory();
            let mut descs = vec![Desc { len: cut, ..header(&mem, kind, sector) }];
            descs.extend(lens.iter().map(|&(len, write)| Desc { addr: BUFFERS, len, write }));
            descs.sort_by_key(|desc| desc.write);
            let chain = chain(&mem, &descs);
            if let Ok(Action::Transfer { write, offset, len }) = parse(&chain, &mem, CAPACITY) {
                prop_assert!(len.is_multiple_of(SECTOR));
                prop_assert!(offset.checked_add(len).unwrap() <= CAPACITY);
                let data: u64 = data(&chain, write, len).map(|desc| u64::from(desc.len)).sum();
                prop_assert_eq!(data, len);
            }
        }
    }
}
