//! One request of a block device, from the chain to its status.

use ringfence_mem::{Access, AccessError, HostSlice, Translate};
use ringfence_vhost_user_backend::requests::Missing;
use ringfence_virtq::{
    Chain, Desc,
    blk::{
        EXTENT_BYTES, EXTENT_UNMAP, Extent, HEADER_BYTES, Header, ID_BYTES, Kind, SECTOR, Status,
    },
    cut,
};
use zerocopy::FromBytes;

use crate::disk::{Disk, Holes, Ram};

/// The most sectors that a discard, or a request to write zeroes, may have: 1 GiB.
pub const MOST_ZEROED: u32 = 1 << 21;

/// The most bytes that a transfer may have: 1 GiB. Firmware that ignores the limits in the
/// configuration space (OVMF, which reads a whole file at once) stays below it, as do drivers, which
/// read the limits.
pub const MOST_MOVED: u64 = 1 << 30;

/// What a disk can do, as far as requests are concerned.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes in all.
    pub capacity: u64,
    /// Whether nothing may be written.
    pub read_only: bool,
    /// How ranges are zeroed.
    pub holes: Holes,
}

impl Limits {
    /// The limits of `disk`.
    pub fn of(disk: &Disk, read_only: bool) -> Limits {
        Limits { capacity: disk.len(), read_only, holes: disk.holes() }
    }
}

/// The request in a chain, checked against the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Move `len` bytes between the disk at `offset` and the data of the chain.
    Transfer {
        /// To the disk, rather than from it.
        write: bool,
        /// Where on the disk, in bytes.
        offset: u64,
        /// How many bytes: a multiple of the sector size, perhaps 0.
        len: u64,
    },
    /// Make what was written durable.
    Flush,
    /// Return the device ID.
    Identify,
    /// Make a range read as zeroes.
    Zero {
        /// Where on the disk, in bytes.
        offset: u64,
        /// How many bytes, at least one sector.
        len: u64,
        /// Whether its space may be given back.
        punch: bool,
    },
    /// Nothing: a range without sectors.
    Nothing,
}

/// Why a step of a request did not finish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// It is completed with this status.
    Status(Status),
    /// A translation is missing: the step is to be tried again.
    Missing(Missing),
}

impl From<Status> for Stop {
    fn from(status: Status) -> Stop {
        Stop::Status(status)
    }
}

/// An unmapped address is an I/O error; a missing translation is waited for.
impl From<AccessError> for Stop {
    fn from(error: AccessError) -> Stop {
        Missing::of(error).map_or(Stop::Status(Status::IoErr), Stop::Missing)
    }
}

/// Reads the header of a chain and checks it against a disk.
///
/// # Errors
/// The status of the request, or what is missing.
pub fn parse(chain: &Chain, mem: &impl Translate, limits: &Limits) -> Result<Action, Stop> {
    let mut bytes = [0; HEADER_BYTES];
    // A request without room for its status is not carried out.
    if chain.writable_len() == 0 || chain.read_at(mem, 0, &mut bytes)? != HEADER_BYTES {
        return Err(Status::IoErr.into());
    }
    let header = Header::read_from_bytes(&bytes).expect("the array has the header's size");
    let kind = Kind::from_code(header.kind.get()).ok_or(Status::Unsupported)?;
    if limits.read_only && matches!(kind, Kind::Out | Kind::Discard | Kind::WriteZeroes) {
        return Err(Status::IoErr.into());
    }
    let (write, len) = match kind {
        Kind::Flush => return Ok(Action::Flush),
        Kind::GetId => return Ok(Action::Identify),
        Kind::Discard | Kind::WriteZeroes => return zero(chain, mem, limits, kind),
        // Of what the device writes, the last byte is the status.
        Kind::In => (false, chain.writable_len().saturating_sub(1)),
        Kind::Out => (true, chain.readable_len() - HEADER_BYTES as u64),
    };
    let offset = place(header.sector.get(), len, limits)?;
    if !len.is_multiple_of(SECTOR) || len > MOST_MOVED {
        return Err(Status::IoErr.into());
    }
    Ok(Action::Transfer { write, offset, len })
}

/// Where a range of the disk begins, in bytes.
fn place(sector: u64, len: u64, limits: &Limits) -> Result<u64, Status> {
    let offset = sector.checked_mul(SECTOR).ok_or(Status::IoErr)?;
    match offset.checked_add(len) {
        Some(end) if end <= limits.capacity => Ok(offset),
        _ => Err(Status::IoErr),
    }
}

/// Parses a discard, or a request to write zeroes. It has one segment: the configuration space allows
/// no more.
fn zero(chain: &Chain, mem: &impl Translate, limits: &Limits, kind: Kind) -> Result<Action, Stop> {
    let Holes { punch, zero, unit } = limits.holes;
    let can = if kind == Kind::Discard { punch } else { punch || zero };
    if !can {
        return Err(Status::Unsupported.into());
    }
    let mut bytes = [0; EXTENT_BYTES];
    if chain.readable_len() != (HEADER_BYTES + EXTENT_BYTES) as u64 {
        return Err(Status::IoErr.into());
    }
    chain.read_at(mem, HEADER_BYTES as u64, &mut bytes)?;
    let extent = Extent::read_from_bytes(&bytes).expect("the array has its size");
    let known = if kind == Kind::Discard { 0 } else { EXTENT_UNMAP };
    if extent.flags.get() & !known != 0 {
        return Err(Status::Unsupported.into());
    }
    if extent.sectors.get() > MOST_ZEROED {
        return Err(Status::IoErr.into());
    }
    let len = u64::from(extent.sectors.get()) * SECTOR;
    let offset = place(extent.sector.get(), len, limits)?;
    if len == 0 {
        return Ok(Action::Nothing);
    }
    if !(offset | len).is_multiple_of(unit.into()) {
        return Err(Status::Unsupported.into());
    }
    // Keeping the space allocated is optional; reading zeroes is required.
    let wanted = kind == Kind::Discard || extent.flags.get() & EXTENT_UNMAP != 0;
    Ok(Action::Zero { offset, len, punch: punch && (wanted || !zero) })
}

/// The buffers of `len` bytes of a transfer's data from `at` on, which the chain must have. Header and
/// status are no data.
pub(super) fn part(
    chain: &Chain,
    write: bool,
    at: u64,
    len: u64,
) -> impl Iterator<Item = Desc> + '_ {
    match write {
        true => cut(chain.readable(), HEADER_BYTES as u64 + at, len),
        false => cut(chain.writable(), at, len),
    }
}

/// Moves the data of a transfer between memory and a disk in memory.
///
/// # Errors
/// An address cannot be reached; what came before it was moved.
///
/// # Panics
/// If the range is not on the disk, which [`parse`] checks.
pub fn transfer(
    chain: &Chain,
    mem: &impl Translate,
    ram: &Ram,
    write: bool,
    offset: u64,
    len: u64,
) -> Result<(), AccessError> {
    let mut at = offset;
    for desc in part(chain, write, 0, len) {
        let access = if write { Access::Read } else { Access::Write };
        mem.slices(desc.addr, desc.len.into(), access, |piece| {
            if write {
                ram.write(at, piece);
            } else {
                ram.read(at, piece);
                mem.mark(piece);
            }
            at += piece.len() as u64;
        })?;
    }
    Ok(())
}

/// Copies data of a transfer of `whole` bytes between memory and `pieces`, from `at` bytes on, as far as
/// there are pieces.
///
/// # Errors
/// An address cannot be reached; what came before it was moved.
pub(super) fn copy<'p>(
    chain: &Chain,
    mem: &impl Translate,
    (write, whole, at): (bool, u64, u64),
    pieces: impl IntoIterator<Item = HostSlice<'p>>,
) -> Result<(), AccessError> {
    let access = if write { Access::Read } else { Access::Write };
    let mut pieces = pieces.into_iter();
    let mut piece = pieces.next();
    // As much as there is room for, so that nothing is translated that is not used.
    let mut skip = at;
    for desc in part(chain, write, 0, whole) {
        let passed = skip.min(desc.len.into());
        skip -= passed;
        // No buffer of a chain passes the end of the address space.
        let (mut addr, mut left) = (desc.addr.wrapping_add(passed), u64::from(desc.len) - passed);
        while left > 0 {
            let Some(room) = piece.as_ref().filter(|piece| !piece.is_empty()) else {
                match pieces.next() {
                    Some(next) => piece = Some(next),
                    None => return Ok(()),
                }
                continue;
            };
            let len = left.min(room.len() as u64);
            let mut done = 0;
            mem.slices(addr, len, access, |memory| {
                let part = room.part(done, memory.len());
                done += match write {
                    true => part.copy_from_piece(memory.into()),
                    false => {
                        let done = memory.copy_from_piece(part.into());
                        mem.mark(memory);
                        done
                    }
                };
            })?;
            piece = Some(room.part(done, room.len() - done));
            addr = addr.wrapping_add(len);
            left -= len;
        }
    }
    Ok(())
}

/// Writes the device ID, as far as there is room; returns how many bytes.
///
/// # Errors
/// The buffer cannot be reached.
pub(super) fn identify(
    chain: &Chain,
    mem: &impl Translate,
    name: &str,
) -> Result<u32, AccessError> {
    let mut id = [0; ID_BYTES];
    let len = name.len().min(ID_BYTES);
    id[..len].copy_from_slice(&name.as_bytes()[..len]);
    let room = chain.writable_len().saturating_sub(1).min(ID_BYTES as u64) as usize;
    chain.write_at(mem, 0, &id[..room]).map(|done| done as u32)
}

/// Writes the status byte and returns the used length: what was written, the status included, or
/// 0 if not even the status could be.
///
/// # Errors
/// The translation of the status byte is missing: to be tried again.
pub fn complete(
    chain: &Chain,
    mem: &impl Translate,
    status: Status,
    written: u32,
) -> Result<u32, Missing> {
    let Some(last) = chain.writable_len().checked_sub(1) else { return Ok(0) };
    match chain.write_at(mem, last, &[status.code()]) {
        Ok(1) => Ok(written.saturating_add(1)),
        Ok(_) => Ok(0),
        Err(error) => Missing::of(error).map_or(Ok(0), Err),
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
    const LIMITS: Limits = Limits { capacity: CAPACITY, read_only: false, holes: Holes::ALL };

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
    fn parsed(kind: u32, sector: u64, len: u32) -> Result<Action, Stop> {
        let mem = memory();
        let header = header(&mem, kind, sector);
        let write = kind == Kind::In.code();
        let data = Desc { addr: BUFFERS + 0x1000, len, write };
        let status = Desc::writable(BUFFERS + 0x800, 1);
        parse(&chain(&mem, &[header, data, status]), &mem, &LIMITS)
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
                assert_eq!(
                    parsed(kind, sector, len),
                    Err(Stop::Status(Status::IoErr)),
                    "{sector} {len}"
                );
            }
        }
        // Nothing at the very end is still on the disk.
        assert!(parsed(0, 64, 0).is_ok() && parsed(0, 65, 0).is_err());
    }

    #[test]
    fn a_transfer_moves_no_more_bytes_than_it_may() {
        let (mem, limits) = (memory(), Limits { capacity: 1 << 40, ..LIMITS });
        for kind in [Kind::In, Kind::Out] {
            for (more, fits) in [(0, true), (512, false), ((2 << 30) + 512, false)] {
                let header = header(&mem, kind.code(), 8);
                let len = (MOST_MOVED + more) as u32;
                let data = Desc { addr: BUFFERS, len, write: kind == Kind::In };
                let chain = chain(&mem, &[header, data, Desc::writable(BUFFERS, 1)]);
                let parsed = parse(&chain, &mem, &limits);
                match fits {
                    true => assert!(matches!(parsed, Ok(Action::Transfer { .. }))),
                    false => assert_eq!(parsed, Err(Stop::Status(Status::IoErr))),
                }
            }
        }
    }

    #[test]
    fn what_moves_no_data_is_not_checked_against_the_disk() {
        assert_eq!(parsed(4, u64::MAX, 3), Ok(Action::Flush));
        assert_eq!(parsed(8, u64::MAX, 3), Ok(Action::Identify));
        for unknown in [2, 3, 5, 12, 14, u32::MAX] {
            assert_eq!(parsed(unknown, 0, 512), Err(Stop::Status(Status::Unsupported)));
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
        assert_eq!(parse(&chain(&mem, &pieces), &mem, &LIMITS), Ok(Action::Flush));
        let short = chain(&mem, &[Desc::readable(BUFFERS, 15), status]);
        assert_eq!(parse(&short, &mem, &LIMITS), Err(Stop::Status(Status::IoErr)));
        let none = chain(&mem, &[status]);
        assert_eq!(parse(&none, &mem, &LIMITS), Err(Stop::Status(Status::IoErr)));
        let no_status = chain(&mem, &pieces[..3]);
        assert_eq!(parse(&no_status, &mem, &LIMITS), Err(Stop::Status(Status::IoErr)));
        let lost = chain(&mem, &[Desc::readable(1 << 40, 16), status]);
        assert_eq!(parse(&lost, &mem, &LIMITS), Err(Stop::Status(Status::IoErr)));
    }

    #[test]
    fn the_status_is_the_last_byte_that_can_be_written() {
        let mem = memory();
        let header = header(&mem, 0, 0);
        let at = BUFFERS + 0x1000;
        let request = chain(&mem, &[header, Desc::writable(at, 512), Desc::writable(at + 512, 9)]);
        assert_eq!(complete(&request, &mem, Status::Unsupported, 512), Ok(513));
        let mut bytes = [0xff; 9];
        mem.read(at + 512, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 2]);
        // Without room for the status, the used length is 0.
        let nowhere = chain(&mem, &[header, Desc::writable(1 << 40, 1)]);
        assert_eq!(complete(&nowhere, &mem, Status::Ok, 0), Ok(0));
        let readable = chain(&mem, &[header]);
        assert_eq!(complete(&readable, &mem, Status::Ok, 0), Ok(0));
    }

    /// A discard or a request to write zeroes, checked.
    fn zeroed(
        kind: Kind,
        sector: u64,
        sectors: u32,
        flags: u32,
        limits: &Limits,
    ) -> Result<Action, Stop> {
        let mem = memory();
        let header = header(&mem, kind.code(), 77);
        let extent = Extent { sector: sector.into(), sectors: sectors.into(), flags: flags.into() };
        mem.write(BUFFERS + 0x1000, extent.as_bytes()).unwrap();
        let extent = Desc::readable(BUFFERS + 0x1000, EXTENT_BYTES as u32);
        let status = Desc::writable(BUFFERS + 0x800, 1);
        parse(&chain(&mem, &[header, extent, status]), &mem, limits)
    }

    #[test]
    fn what_is_zeroed_lies_on_the_disk_and_keeps_its_space_where_that_is_possible() {
        use Kind::{Discard, WriteZeroes};
        let (offset, len) = (3 * SECTOR, 2 * SECTOR);
        let of = |punch| Ok(Action::Zero { offset, len, punch });
        let with = |punch, zero| Limits { holes: Holes { punch, zero, ..Holes::NONE }, ..LIMITS };
        assert_eq!(zeroed(Discard, 3, 2, 0, &LIMITS), of(true));
        assert_eq!(zeroed(WriteZeroes, 3, 2, 0, &LIMITS), of(false));
        assert_eq!(zeroed(WriteZeroes, 3, 2, EXTENT_UNMAP, &LIMITS), of(true));
        assert_eq!(zeroed(WriteZeroes, 3, 2, 0, &with(true, false)), of(true));
        assert_eq!(zeroed(WriteZeroes, 3, 2, EXTENT_UNMAP, &with(false, true)), of(false));
        assert_eq!(zeroed(Discard, 64, 0, 0, &LIMITS), Ok(Action::Nothing));
        let unsupported = Err(Stop::Status(Status::Unsupported));
        assert_eq!(zeroed(Discard, 3, 2, 0, &with(false, true)), unsupported);
        assert_eq!(zeroed(WriteZeroes, 3, 2, 0, &with(false, false)), unsupported);
        assert_eq!(zeroed(Discard, 3, 2, EXTENT_UNMAP, &LIMITS), unsupported);
        assert_eq!(zeroed(WriteZeroes, 3, 2, 2, &LIMITS), unsupported);
        // A device of larger blocks than the driver's.
        let large = Limits { holes: Holes { unit: 4096, ..Holes::ALL }, ..LIMITS };
        for (sector, sectors) in [(3, 2), (8, 2), (3, 8)] {
            assert_eq!(zeroed(Discard, sector, sectors, 0, &large), unsupported);
            assert_eq!(zeroed(WriteZeroes, sector, sectors, 0, &large), unsupported);
        }
        let whole = Action::Zero { offset: 4096, len: 8192, punch: false };
        assert_eq!(zeroed(WriteZeroes, 8, 16, 0, &large), Ok(whole));
        let failed = Err(Stop::Status(Status::IoErr));
        for (sector, sectors) in [(63, 2), (64, 1), (u64::MAX, 1), (0, u32::MAX), (1 << 55, 1)] {
            assert_eq!(zeroed(Discard, sector, sectors, 0, &LIMITS), failed);
            assert_eq!(zeroed(WriteZeroes, sector, sectors, 0, &LIMITS), failed);
        }
    }

    #[test]
    fn nothing_is_written_to_a_disk_that_is_only_read() {
        let limits = Limits { read_only: true, ..LIMITS };
        let failed = Err(Stop::Status(Status::IoErr));
        assert_eq!(zeroed(Kind::Discard, 3, 2, 0, &limits), failed);
        assert_eq!(zeroed(Kind::WriteZeroes, 3, 2, 0, &limits), failed);
        let mem = memory();
        let data = Desc::readable(BUFFERS + 0x1000, 512);
        let chain = chain(&mem, &[header(&mem, 1, 0), data, Desc::writable(BUFFERS, 1)]);
        assert_eq!(parse(&chain, &mem, &limits), failed);
        assert!(parse(&chain, &mem, &LIMITS).is_ok());
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
            if let Ok(Action::Transfer { write, offset, len }) = parse(&chain, &mem, &LIMITS) {
                prop_assert!(len.is_multiple_of(SECTOR));
                prop_assert!(offset.checked_add(len).unwrap() <= CAPACITY);
                let data: u64 = part(&chain, write, 0, len).map(|desc| u64::from(desc.len)).sum();
                prop_assert_eq!(data, len);
            }
        }
    }
}
