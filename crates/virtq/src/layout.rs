//! The sizes of a virtqueue's areas, and the offsets of their parts (virtio 1.3, 2.7 and 2.8).

/// The largest queue.
pub const MAX_SIZE: u16 = 32768;
/// The most entries that the device's end accepts in one indirect table. Virtio forbids chains
/// longer than the queue, but Linux's drivers do make longer indirect ones.
pub const MAX_INDIRECT: u16 = 1024;
/// Bytes of one descriptor.
pub const DESC_SIZE: usize = 16;
/// Alignment of the descriptor table.
pub const DESC_ALIGN: usize = 16;
/// Alignment of the available ring.
pub const AVAIL_ALIGN: usize = 2;
/// Alignment of the used ring.
pub const USED_ALIGN: usize = 4;

/// Descriptor flag: the chain goes on at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// Descriptor flag: the device writes the buffer (and does not read it).
pub const DESC_F_WRITE: u16 = 2;
/// Descriptor flag: the buffer holds a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;
/// Flag of the available ring: the driver wants no interrupts (without `EVENT_IDX`).
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: the device wants no kicks (without `EVENT_IDX`).
pub const USED_F_NO_NOTIFY: u16 = 1;

/// Offset of the flags in the available and the used ring.
pub const FLAGS: usize = 0;
/// Offset of the index in the available and the used ring.
pub const IDX: usize = 2;
/// Offset of the first entry in the available and the used ring.
pub const RING: usize = 4;

/// Bytes of the descriptor table of a queue of `size`.
pub const fn desc_bytes(size: u16) -> usize {
    DESC_SIZE * size as usize
}

/// Bytes of the available ring of a queue of `size`, the used event included.
pub const fn avail_bytes(size: u16) -> usize {
    used_event(size) + 2
}

/// Bytes of the used ring of a queue of `size`, the available event included.
pub const fn used_bytes(size: u16) -> usize {
    avail_event(size) + 2
}

/// Offset of the used event (at which the driver wants an interrupt) in the available ring.
pub const fn used_event(size: u16) -> usize {
    RING + 2 * size as usize
}

/// Offset of the available event (at which the device wants a kick) in the used ring.
pub const fn avail_event(size: u16) -> usize {
    RING + 8 * size as usize
}

/// Whether a queue may have this size: a power of two, at most [`MAX_SIZE`].
pub const fn is_size(size: u16) -> bool {
    size.is_power_of_two() && size <= MAX_SIZE
}

/// The offsets of the three areas in one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    /// The descriptor table.
    pub desc: usize,
    /// The available ring.
    pub avail: usize,
    /// The used ring.
    pub used: usize,
    /// Bytes of all three, a multiple of 128.
    pub len: usize,
}

/// Places the areas of a queue of `size` one after the other. Each begins on 128 bytes (two cache
/// lines, since processors fetch them in pairs), so that the driver's writes to the available ring
/// and the device's to the used ring do not share one. The allocation must have that alignment too.
pub const fn offsets(size: u16) -> Offsets {
    const APART: usize = 128;
    let avail = desc_bytes(size).next_multiple_of(APART);
    let used = avail + avail_bytes(size).next_multiple_of(APART);
    Offsets { desc: 0, avail, used, len: used + used_bytes(size).next_multiple_of(APART) }
}

/// Whether an index that went from `old` to `new` passed the peer's event, so that the peer wants a
/// notification: whether `event` is one of `old ..= new - 1`, all modulo 2^16 (virtio 2.7.7.2,
/// 2.7.10).
pub const fn passed_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The packed format (virtio 1.3, 2.8): one ring of descriptors that both ends write, and two event
/// structures. A descriptor has the size and alignment of a split one; its last two fields are the
/// buffer id and the flags.
pub mod packed {
    use super::{MAX_SIZE, Offsets, desc_bytes};

    /// Descriptor flag: equal to the driver's wrap counter when it makes the descriptor available.
    pub const DESC_F_AVAIL: u16 = 1 << 7;
    /// Descriptor flag: the inverse of that wrap counter while the descriptor is available; equal
    /// to [`DESC_F_AVAIL`] when it is used.
    pub const DESC_F_USED: u16 = 1 << 15;

    /// Bytes of an event structure: a place in the ring (its wrap counter in bit 15), then flags.
    pub const EVENT_SIZE: usize = 4;
    /// Alignment of an event structure.
    pub const EVENT_ALIGN: usize = 4;
    /// Event flags: notifications are wanted.
    pub const EVENT_ENABLE: u16 = 0;
    /// Event flags: none are wanted.
    pub const EVENT_DISABLE: u16 = 1;
    /// Event flags: one is wanted when the place has been passed (with `EVENT_IDX` only).
    pub const EVENT_DESC: u16 = 2;

    /// Whether a packed queue may have this size: anything from 1 to [`MAX_SIZE`].
    pub const fn is_size(size: u16) -> bool {
        0 < size && size <= MAX_SIZE
    }

    /// Places the areas of a packed queue of `size` one after the other, each on 128 bytes: the
    /// ring as `desc`, the driver's event structure as `avail`, the device's as `used`.
    pub const fn offsets(size: u16) -> Offsets {
        const APART: usize = 128;
        let avail = desc_bytes(size).next_multiple_of(APART);
        Offsets { desc: 0, avail, used: avail + APART, len: avail + 2 * APART }
    }
}
