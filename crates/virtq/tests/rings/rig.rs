//! Memory with rings in it, and rings written and read byte by byte.

use std::ops::Range;

use proptest::prelude::*;
use ringfence_mem::Translate;
use ringfence_virtq::{Desc, device, driver, layout, testing};

/// Addresses of honest peers' rings, and of their buffers.
pub(crate) const BASE: u64 = 0x4000_0000;
pub(crate) const DATA: u64 = BASE + 0x10_0000;

/// Addresses of rings that are written by hand, and of a table.
pub(crate) const RAW: u64 = 0x1_0000;
pub(crate) const TABLE: u64 = RAW + 0x1000;

pub(crate) fn ram() -> testing::Ram {
    testing::Ram::new(BASE, 0x20_0000)
}

pub(crate) fn config(size: u16, packed: bool) -> driver::QueueConfig {
    driver::QueueConfig { size, event_idx: true, packed }
}

/// A descriptor's four fields, in their order in memory: address, length, and two of 16 bits, which
/// are flags and next in a split ring, id and flags in a packed one.
pub(crate) type Raw = (u64, u32, u16, u16);

pub(crate) fn bytes_of((addr, len, third, fourth): Raw) -> [u8; layout::DESC_SIZE] {
    let high = u64::from(len) | u64::from(third) << 32 | u64::from(fourth) << 48;
    (u128::from(addr) | u128::from(high) << 64).to_le_bytes()
}

pub(crate) fn raw_of(bytes: [u8; layout::DESC_SIZE]) -> Raw {
    let value = u128::from_le_bytes(bytes);
    (value as u64, (value >> 64) as u32, (value >> 96) as u16, (value >> 112) as u16)
}

/// Descriptor `at` of the table.
pub(crate) fn read(ram: &testing::Ram, table: u64, at: u16) -> Raw {
    let mut bytes = [0; layout::DESC_SIZE];
    ram.read(table + 16 * u64::from(at), &mut bytes).unwrap();
    raw_of(bytes)
}

pub(crate) fn write(ram: &testing::Ram, table: u64, at: u16, raw: Raw) {
    ram.write(table + 16 * u64::from(at), &bytes_of(raw)).unwrap();
}

/// The descriptor at `addr` of memory from [`RAW`] on, if it is there.
pub(crate) fn find(memory: &[u8], addr: u64) -> Option<Raw> {
    let at = usize::try_from(addr.checked_sub(RAW)?).ok()?;
    Some(raw_of(memory.get(at..at.checked_add(16)?)?.try_into().unwrap()))
}

/// Whether virtio allows a chain of these buffers.
pub(crate) fn is_legal(descs: &[Desc]) -> bool {
    let total: u64 = descs.iter().map(|desc| u64::from(desc.len)).sum();
    let wraps = |desc: &Desc| u128::from(desc.addr) + u128::from(desc.len) > 1 << 64;
    descs.is_sorted_by_key(|desc| desc.write)
        && total <= u64::from(u32::MAX)
        && !descs.iter().any(wraps)
}

/// Addresses of which most lie in a table, and the rest near an end of the memory, of `len` bytes,
/// or of the address space.
pub(crate) fn likely_addr(len: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => (0..64_u64).prop_map(|at| TABLE + 16 * at),
        1 => (0..0x2000_u64).prop_map(|at| RAW + at),
        1 => (0..64_u64).prop_map(move |at| RAW + len - at),
        1 => (0..40_u64).prop_map(|at| u64::MAX - at),
        1 => any::<u64>(),
    ]
}

/// Lengths of which most are those of a table of fewer than `most` entries.
pub(crate) fn likely_len(most: u32) -> impl Strategy<Value = u32> {
    prop_oneof![6 => (0..most).prop_map(|n| 16 * n), 2 => 0..40_u32, 1 => any::<u32>()]
}

/// All of the memory.
pub(crate) fn contents(ram: &testing::Ram) -> Vec<u8> {
    let mut bytes = vec![0; ram.len()];
    ram.read(ram.base(), &mut bytes).unwrap();
    bytes
}

/// Checks that the memory is as `before`, except at these addresses.
pub(crate) fn unchanged_but(
    ram: &testing::Ram,
    before: &[u8],
    but: Range<u64>,
) -> Result<(), TestCaseError> {
    for (at, (before, after)) in (ram.base()..).zip(before.iter().zip(contents(ram))) {
        prop_assert!(but.contains(&at) || *before == after, "byte {:#x}", at);
    }
    Ok(())
}

/// What a driver has added: chains of so many writable descriptors of `room` bytes each, some of
/// which it has published. Their numbers are their tokens.
pub(crate) struct Added {
    room: u32,
    /// Those that did not come back.
    out: Vec<(u64, usize)>,
    published: usize,
    free: u16,
}

impl Added {
    /// Adds each chain, if there is room for it, and publishes after those with the flag set.
    pub(crate) fn to(queue: &mut driver::Queue, room: u32, chains: &[(usize, bool)]) -> Added {
        let (mut out, mut published) = (Vec::new(), 0);
        for (token, &(len, publish)) in chains.iter().enumerate() {
            if queue.add(&vec![Desc::writable(0, room); len], token as u64).is_ok() {
                out.push((token as u64, len));
            }
            if publish {
                queue.publish();
                published = out.len();
            }
        }
        Added { room, out, published, free: queue.free_descs() }
    }

    /// For anything that the device has written: each token comes back at most once and only after
    /// it was published, and descriptors neither vanish nor appear.
    pub(crate) fn comes_back_at_most_once(
        mut self,
        queue: &mut driver::Queue,
    ) -> Result<(), TestCaseError> {
        while let Ok(Some(used)) = queue.pop() {
            let place =
                self.out[..self.published].iter().position(|&(token, _)| token == used.token);
            let Some(place) = place else {
                return Err(TestCaseError::fail(format!("{used:?} was not out")));
            };
            self.published -= 1;
            let (_, len) = self.out.remove(place);
            prop_assert!(u64::from(used.len) <= u64::from(self.room) * len as u64);
            self.free += len as u16;
        }
        prop_assert_eq!(queue.free_descs(), self.free);
        prop_assert_eq!(usize::from(queue.in_flight()), self.out.len());
        prop_assert_eq!(queue.pop().err(), queue.broken());
        if queue.broken().is_none() {
            // Every free descriptor can still be used once.
            for _ in 0..queue.free_descs() {
                queue.add(&[Desc::readable(0, 0)], 0).unwrap();
            }
            prop_assert!(queue.add(&[Desc::readable(0, 0)], 0).is_err());
        }
        Ok(())
    }
}

/// A device that takes any chains it finds and gives them back at once, over random bytes in areas
/// that end at a guard page.
pub(crate) fn serve_random(config: device::RingConfig, bytes: &[u8]) {
    let ram = testing::Ram::new(0, bytes.len());
    ram.write(0, bytes).unwrap();
    let mut queue = device::Queue::new(config, &ram).unwrap();
    let mut chain = ringfence_virtq::Chain::new();
    // The areas overlap, so giving back changes the rings: it need not end.
    for _ in 0..100 {
        queue.peek_from(&ram, 0, 100, |_| ());
        if !matches!(queue.pop(&ram, &mut chain), Ok(true)) {
            break;
        }
        queue.push_used(chain.head(), 7);
        let _ = queue.publish_used();
    }
}
