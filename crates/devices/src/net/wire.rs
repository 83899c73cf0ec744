//! What virtio-net looks like in memory (virtio 1.3, 5.1).

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout,
    little_endian::{U16, U32},
};

/// Feature bits (virtio 1.3, 5.1.3).
pub mod feature {
    /// The device takes packets whose checksum is not computed yet.
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes such packets.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The configuration space has an MTU.
    pub const MTU: u64 = 1 << 3;
    /// The configuration space has an address.
    pub const MAC: u64 = 1 << 5;
    /// The driver takes TCP segments over IPv4 that are not cut yet.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The same over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The same with congestion marks.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The driver takes UDP datagrams that are not fragmented yet.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The device takes TCP segments over IPv4 that are not cut yet.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The same over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The same with congestion marks.
    pub const HOST_ECN: u64 = 1 << 13;
    /// The device takes UDP datagrams that are not fragmented yet.
    pub const HOST_UFO: u64 = 1 << 14;
    /// A packet may lie in several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The configuration space says whether the link is up.
    pub const STATUS: u64 = 1 << 16;
    /// There may be several pairs of queues.
    pub const MQ: u64 = 1 << 22;
    /// The driver takes UDP datagrams over IPv4 that are not cut yet.
    pub const GUEST_USO4: u64 = 1 << 54;
    /// The same over IPv6.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// The device takes UDP datagrams that are not cut yet.
    pub const HOST_USO: u64 = 1 << 56;

    /// All that the driver may leave for the device to do.
    pub const HOST_OFFLOADS: u64 = CSUM | HOST_TSO4 | HOST_TSO6 | HOST_ECN | HOST_UFO | HOST_USO;
    /// All that the device may leave for the driver to do.
    pub const GUEST_OFFLOADS: u64 =
        GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_UFO | GUEST_USO4 | GUEST_USO6;
}

/// Bytes of the header before each packet.
pub const HEADER: usize = size_of::<Header>();
/// Bytes of the header of a driver that knows neither virtio 1.x nor mergeable buffers: it has no
/// `num_buffers`.
pub const LEGACY_HEADER: usize = HEADER - 2;
/// The most bytes of a packet with its header: what a segment that is not cut yet may have.
pub const MAX_PACKET: usize = HEADER + 65_550 + 18;
/// The configuration space's status: the link is up.
pub const LINK_UP: u16 = 1;

/// Flag of the header: the checksum is still to be computed.
pub const NEEDS_CSUM: u8 = 1;
/// Flag of [`Header::gso_type`]: with congestion marks.
const GSO_ECN: u8 = 0x80;

/// What stands before each packet.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// Whether the checksum is to be computed, say.
    pub flags: u8,
    /// What is still to be cut into segments.
    pub gso_type: u8,
    /// Bytes of the protocols' headers.
    pub hdr_len: U16,
    /// Bytes of a segment.
    pub gso_size: U16,
    /// Where what is summed begins.
    pub csum_start: U16,
    /// Where the checksum goes, from there.
    pub csum_offset: U16,
    /// In how many buffers the packet lies (received packets).
    pub num_buffers: U16,
}

impl Header {
    /// What a receiver that negotiated `features` is told of a packet that a sender describes so;
    /// `None` if the receiver cannot do what is left to be done.
    #[inline]
    pub fn received(mut self, features: u64, buffers: u16) -> Option<Header> {
        if self.flags | self.gso_type != 0 {
            // What else a sender may say there (that a checksum is right) it may not vouch for.
            self.flags &= NEEDS_CSUM;
            if self.needs() & !features != 0 {
                return None;
            }
        }
        self.num_buffers.set(buffers);
        Some(self)
    }

    /// Which features a receiver needs for what is left to be done; all, for what is not known.
    #[cold]
    fn needs(&self) -> u64 {
        use feature::{GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_UFO};
        let csum = if self.flags & NEEDS_CSUM != 0 { GUEST_CSUM } else { 0 };
        let ecn = if self.gso_type & GSO_ECN != 0 { GUEST_ECN } else { 0 };
        let gso = match self.gso_type & !GSO_ECN {
            0 => 0,
            1 => GUEST_TSO4,
            3 => GUEST_UFO,
            4 => GUEST_TSO6,
            5 => feature::GUEST_USO4 | feature::GUEST_USO6,
            _ => u64::MAX,
        };
        csum | ecn | gso
    }
}

/// The configuration space.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// The device's address.
    pub mac: [u8; 6],
    /// See [`LINK_UP`].
    pub status: U16,
    /// How many pairs of queues there may be.
    pub max_virtqueue_pairs: U16,
    /// The largest packet, without the link's header.
    pub mtu: U16,
    /// In Mbit/s; all ones: not known.
    pub speed: U32,
    /// 1: both directions at once.
    pub duplex: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_and_configuration_are_laid_out_as_virtio_says() {
        assert_eq!((HEADER, LEGACY_HEADER, size_of::<Config>()), (12, 10, 17));
        let bytes: [u8; HEADER] = std::array::from_fn(|at| at as u8 + 1);
        let header = Header::read_from_bytes(&bytes).unwrap();
        assert_eq!((header.flags, header.gso_type), (1, 2));
        assert_eq!((header.hdr_len.get(), header.num_buffers.get()), (0x0403, 0x0c0b));
    }

    #[test]
    fn a_receiver_is_left_only_what_it_can_do() {
        use feature::*;
        let header = |flags, gso_type| Header { flags, gso_type, ..Header::default() };
        assert_eq!(header(0, 0).received(0, 3).unwrap().num_buffers.get(), 3);
        // That the checksum is right is nothing that a sender can say.
        assert_eq!(header(2, 0).received(0, 1).unwrap().flags, 0);
        for (flags, gso_type, needed) in [
            (1, 0, GUEST_CSUM),
            (1, 1, GUEST_CSUM | GUEST_TSO4),
            (1, 4, GUEST_CSUM | GUEST_TSO6),
            (1, 3, GUEST_CSUM | GUEST_UFO),
            (1, 0x81, GUEST_CSUM | GUEST_TSO4 | GUEST_ECN),
            (1, 5, GUEST_CSUM | GUEST_USO4 | GUEST_USO6),
        ] {
            assert!(header(flags, gso_type).received(needed, 1).is_some());
            for bit in (0..64).map(|bit| 1 << bit).filter(|bit| needed & bit != 0) {
                assert!(header(flags, gso_type).received(needed & !bit, 1).is_none());
                assert!(header(flags, gso_type).received(!bit, 1).is_none());
            }
        }
        assert!(header(0, 2).received(GUEST_OFFLOADS, 1).is_none());
    }
}
