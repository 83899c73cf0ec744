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
