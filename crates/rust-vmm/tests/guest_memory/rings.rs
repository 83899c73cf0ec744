//! A driver of a split ring, in plain memory, and a device as it would be written for rust-vmm
//! without an IOMMU in mind.

use std::{
    io::{Read, Write},
    ops::Deref,
};

use virtio_bindings::bindings::virtio_ring::{
    VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemory};

pub(crate) const SIZE: u16 = 512;
/// The ring's addresses for the device: its descriptors fill two pages.
pub(crate) const TABLE: u64 = 0;
pub(crate) const AVAIL: u64 = 0x2000;
pub(crate) const USED: u64 = 0x3000;
/// The first address after it.
pub(crate) const END: u64 = 0x5000;

pub(crate) const NEXT: u16 = VRING_DESC_F_NEXT as u16;
pub(crate) const WRITE: u16 = VRING_DESC_F_WRITE as u16;
pub(crate) const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// Writes descriptor `index` of the table at `table`, both as the driver sees them.
pub(crate) fn descriptor(
    memory: &impl GuestMemory,
    table: u64,
    index: u16,
    (addr, len, flags, next): (u64, u32, u16, u16),
) {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    memory.write_slice(&bytes, GuestAddress(table + 16 * u64::from(index))).unwrap();
}

/// Makes the chain that begins with `head` available, the `count`-th one.
pub(crate) fn publish(memory: &impl GuestMemory, avail: u64, count: u16, head: u16) {
    let slot = avail + 4 + 2 * u64::from(count % SIZE);
    memory.write_obj(head, GuestAddress(slot)).unwrap();
    memory.write_obj(count.wrapping_add(1), GuestAddress(avail + 2)).unwrap();
}

/// The used ring: what was published, with its lengths.
pub(crate) fn used(memory: &impl GuestMemory, used: u64) -> Vec<(u32, u32)> {
    let count: u16 = memory.read_obj(GuestAddress(used + 2)).unwrap();
    let slot = |at| memory.read_obj(GuestAddress(used + 4 + 4 * at)).unwrap();
    (0..u64::from(count)).map(|at| (slot(2 * at), slot(2 * at + 1))).collect()
}

pub(crate) fn queue() -> Queue {
    let mut queue = Queue::new(SIZE).unwrap();
    queue.try_set_desc_table_address(GuestAddress(TABLE)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(AVAIL)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_ready(true);
    queue
}

/// How a device takes its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Style {
    /// Once for a run over the ring.
    OneGuard,
    /// Once for each use, as devices on vhost-user-backend do.
    ManyGuards,
    /// Walks the chain twice and trusts the lengths that it sees.
    ByDescriptor,
}

/// Serves all available requests, and takes any error in a request for its end: it writes the bytes
/// that it has read, each plus one.
pub(crate) fn serve<S>(space: &S, queue: &mut Queue, style: Style)
where
    S: GuestAddressSpace<M: GuestMemory<Bitmap = ()>>,
{
    let memory = space.memory();
    let Ok(chains) = queue.iter(memory.clone()) else { return };
    for chain in chains.collect::<Vec<_>>() {
        let head = chain.head_index();
        let mut bytes = Vec::new();
        let mut written = 0;
        if let Style::ByDescriptor = style {
            for buffer in chain.clone().readable() {
                let mut part = vec![0; buffer.len() as usize];
                let got = memory.read(&mut part, buffer.addr()).unwrap_or(0);
                bytes.extend_from_slice(&part[..got]);
            }
            let mut left: Vec<u8> = bytes.iter().map(|byte| byte.wrapping_add(1)).collect();
            for buffer in chain.writable() {
                let part: Vec<_> = left.drain(..left.len().min(buffer.len() as usize)).collect();
                written += memory.write(&part, buffer.addr()).unwrap_or(0);
            }
        } else {
            if let Ok(mut reader) = chain.clone().reader(memory.deref()) {
                let _ = reader.read_to_end(&mut bytes);
            }
            let reply: Vec<u8> = bytes.iter().map(|byte| byte.wrapping_add(1)).collect();
            if let Ok(mut writer) = chain.writer(memory.deref()) {
                let fits = reply.len().min(writer.available_bytes());
                written = writer.write(&reply[..fits]).unwrap_or(0);
            }
        }
        let _ = match style {
            Style::ManyGuards => queue.add_used(space.memory().deref(), head, written as u32),
            _ => queue.add_used(memory.deref(), head, written as u32),
        };
    }
}
