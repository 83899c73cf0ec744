//! What virtio-net looks like in memory (virtio 1.3, 5.1).

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout,
    little_endian::{U16, U32},
};

use super::stats::Lost;

/// Feature bits (virtio 1.3, 5.1.3).
pub mod feature {
    /// The device takes packets with a checksum that is still to be computed.
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
    /// The configuration space holds whether the link is up.
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
/// Bytes of the header with neither virtio 1.x nor mergeable buffers: it has no `num_buffers`.
pub const LEGACY_HEADER: usize = HEADER - 2;
/// The most bytes of a packet with its header: what a segment that is not cut yet may have.
pub const MAX_PACKET: usize = HEADER + 65_550 + 18;
/// The configuration space's status: the link is up.
pub const LINK_UP: u16 = 1;

/// Flag of the header: the checksum is still to be computed.
pub const NEEDS_CSUM: u8 = 1;
/// Flag of [`Header::gso_type`]: with congestion marks.
const GSO_ECN: u8 = 0x80;
const GSO_TCP4_ECN: u8 = 1 | GSO_ECN;
const GSO_TCP6_ECN: u8 = 4 | GSO_ECN;
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// The header before each packet.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// Such as [`NEEDS_CSUM`].
    pub flags: u8,
    /// What is still to be cut into segments.
    pub gso_type: u8,
    /// Bytes of the protocols' headers.
    pub hdr_len: U16,
    /// Bytes of a segment.
    pub gso_size: U16,
    /// The offset, in bytes from the end of this header, at which what is summed begins.
    pub csum_start: U16,
    /// The offset of the checksum from there.
    pub csum_offset: U16,
    /// In how many buffers the packet lies (received packets).
    pub num_buffers: U16,
}

impl Header {
    /// The header for a receiver that negotiated `features`, of a packet of `bytes` bytes with this
    /// header of the sender's.
    ///
    /// # Errors
    /// Why the packet is lost: the description is wrong, or the receiver did not negotiate the
    /// offload that it needs.
    #[inline]
    pub(super) fn received(
        self,
        features: u64,
        buffers: u16,
        bytes: usize,
    ) -> Result<Header, Lost> {
        let mut header = self.described(bytes)?;
        if header.flags != 0 && header.needs() & !features != 0 {
            return Err(Lost::Offload);
        }
        header.num_buffers.set(buffers);
        Ok(header)
    }

    /// The description of a packet of `bytes` bytes, sanitized: nothing in it leads out of the
    /// packet, and fields that mean nothing are 0.
    ///
    /// Virtio 1.2, 5.1.6.2 and 5.1.6.4: the checksum at `csum_start` + `csum_offset` is over what begins at
    /// `csum_start`. A packet that is to be cut has one too, by which its parts are made: of TCP or UDP, behind
    /// headers of Ethernet and IP; and a size of the parts. `hdr_len` is only a hint. A receiver's
    /// kernel would look for those headers where the description says.
    ///
    /// # Errors
    /// [`Lost::Malformed`].
    #[inline]
    pub(super) fn described(self, bytes: usize) -> Result<Header, Lost> {
        // Also drops the claim that the checksum is valid, which cannot be trusted.
        if self.flags & NEEDS_CSUM == 0 && self.gso_type == 0 {
            return Ok(Header::default());
        }
        self.with_work(bytes)
    }

    #[cold]
    fn with_work(mut self, bytes: usize) -> Result<Header, Lost> {
        let (start, offset) =
            (usize::from(self.csum_start.get()), usize::from(self.csum_offset.get()));
        // Of a packet that is to be cut: the least before the header of TCP or UDP, the least that this
        // has, and where its checksum is.
        let (least, header, at) = match self.gso_type {
            0 => (ETHERNET, offset + 2, offset),
            1 | GSO_TCP4_ECN => (ETHERNET + 20, 20, 16),
            4 | GSO_TCP6_ECN => (ETHERNET + 40, 20, 16),
            3 | 5 => (ETHERNET + 20, 8, 6),
            _ => return Err(Lost::Malformed),
        };
        let good = self.flags & NEEDS_CSUM != 0
            && start >= least
            && start + header <= bytes
            && offset == at
            && (self.gso_type == 0 || self.gso_size.get() != 0);
        if !good {
            return Err(Lost::Malformed);
        }
        self.flags = NEEDS_CSUM;
        if self.gso_type == 0 {
            (self.hdr_len, self.gso_size) = Default::default();
        }
        // No more than there is, and of what is to be cut no less than the headers that were looked at.
        let most = bytes.min(usize::from(u16::MAX));
        let headers = if self.gso_type == 0 { 0 } else { start + header };
        let len = usize::from(self.hdr_len.get()).clamp(headers.min(most), most);
        self.hdr_len.set(len as u16);
        self.num_buffers.set(0);
        Ok(self)
    }

    /// Which features a receiver needs for what is left to be done.
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
pub struct NetConfig {
    /// The device's address.
    pub mac: [u8; 6],
    /// See [`LINK_UP`].
    pub status: U16,
    /// How many pairs of queues there may be.
    pub max_virtqueue_pairs: U16,
    /// The largest packet, in bytes, without the link's header.
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
        assert_eq!((HEADER, LEGACY_HEADER, size_of::<NetConfig>()), (12, 10, 17));
        let bytes: [u8; HEADER] = std::array::from_fn(|at| at as u8 + 1);
        let header = Header::read_from_bytes(&bytes).unwrap();
        assert_eq!((header.flags, header.gso_type), (1, 2));
        assert_eq!((header.hdr_len.get(), header.num_buffers.get()), (0x0403, 0x0c0b));
    }

    /// A header of these, with offsets that are right for a packet of 100 bytes.
    fn header(flags: u8, gso_type: u8) -> Header {
        let (csum_start, csum_offset) = match gso_type & !GSO_ECN {
            1 => (34, 16),
            4 => (54, 16),
            _ => (34, 6),
        };
        Header {
            flags,
            gso_type,
            hdr_len: 74.into(),
            gso_size: 10.into(),
            csum_start: csum_start.into(),
            csum_offset: csum_offset.into(),
            num_buffers: 9.into(),
        }
    }

    #[test]
    fn a_receiver_is_left_only_what_it_can_do() {
        use feature::*;
        let received =
            |flags, gso_type, features| header(flags, gso_type).received(features, 3, 100);
        assert_eq!(
            received(0, 0, 0).unwrap(),
            Header { num_buffers: 3.into(), ..Header::default() }
        );
        // A sender's claim that the checksum is right is dropped.
        assert_eq!(received(2, 0, 0).unwrap().flags, 0);
        assert_eq!(received(3, 0, GUEST_CSUM).unwrap().flags, 1);
        for (flags, gso_type, needed) in [
            (1, 0, GUEST_CSUM),
            (1, 1, GUEST_CSUM | GUEST_TSO4),
            (1, 4, GUEST_CSUM | GUEST_TSO6),
            (1, 3, GUEST_CSUM | GUEST_UFO),
            (1, 0x81, GUEST_CSUM | GUEST_TSO4 | GUEST_ECN),
            (1, 5, GUEST_CSUM | GUEST_USO4 | GUEST_USO6),
        ] {
            assert!(received(flags, gso_type, needed).is_ok());
            for bit in (0..64).map(|bit| 1 << bit).filter(|bit| needed & bit != 0) {
                assert_eq!(received(flags, gso_type, needed & !bit), Err(Lost::Offload));
                assert_eq!(received(flags, gso_type, !bit), Err(Lost::Offload));
            }
        }
    }

    #[test]
    fn a_packet_that_is_not_as_it_is_described_is_lost() {
        type Change = fn(&mut Header);
        let changes: [(Change, &[u8]); 8] = [
            // To be cut, and without a checksum.
            (|h| h.flags = 0, &[1, 4, 3, 5, 0x81]),
            (|h| h.flags = 0xfe, &[1, 4, 3, 5, 0x81]),
            // Into parts of no bytes.
            (|h| h.gso_size.set(0), &[1, 4, 3, 5, 0x84]),
            // No place for the headers before.
            (|h| h.csum_start.set(33), &[1, 4, 3, 5]),
            (|h| h.csum_start.set(13), &[0, 1, 4, 3, 5]),
            // Behind the end.
            (|h| h.csum_start.set(93), &[0, 1, 4, 3, 5]),
            (|h| h.csum_start.set(u16::MAX), &[0, 1, 4, 3, 5]),
            // Neither the offset of TCP's nor of UDP's checksum.
            (|h| h.csum_offset.set(h.csum_offset.get() + 1), &[1, 4, 3, 5]),
        ];
        for (at, (change, types)) in changes.into_iter().enumerate() {
            for &gso_type in types {
                let mut header = header(1, gso_type);
                assert!(header.received(!0, 1, 100).is_ok(), "{gso_type}");
                change(&mut header);
                let (got, case) = (header.received(!0, 1, 100), format!("{at} {gso_type}"));
                assert_eq!(got, Err(Lost::Malformed), "{case}");
                assert_eq!(header.described(100), Err(Lost::Malformed), "{case}");
            }
        }
        for gso_type in (0..=255).filter(|kind| ![0, 1, 3, 4, 5, 0x81, 0x84].contains(kind)) {
            assert_eq!(
                header(1, gso_type).received(!0, 1, 100),
                Err(Lost::Malformed),
                "{gso_type}"
            );
        }
    }

    /// Every offset at every length, near all that is a limit.
    #[test]
    fn nothing_that_is_passed_on_leads_out_of_the_packet() {
        let near =
            [0, 1, 13, 14, 33, 34, 53, 54, 59, 60, 61, 98, 99, 100, 101, 0x7fff, 0x8000, 0xffff];
        for (gso_type, bytes) in [0, 1, 3, 4, 5, 0x81, 0x84]
            .into_iter()
            .flat_map(|kind| [0, 14, 42, 54, 74, 100, 0x1_000e].map(|bytes| (kind, bytes)))
        {
            for (start, offset) in near.into_iter().flat_map(|s| near.map(|o| (s, o))) {
                for offset in [offset, 6, 16] {
                    let mut sent = header(1, gso_type);
                    sent.csum_start.set(start);
                    sent.csum_offset.set(offset);
                    sent.hdr_len.set(start ^ offset);
                    let Ok(got) = sent.received(!0, 1, bytes) else { continue };
                    assert_eq!(
                        (got.csum_start, got.csum_offset),
                        (sent.csum_start, sent.csum_offset)
                    );
                    let place = usize::from(start) + usize::from(offset);
                    assert!(
                        start >= 14 && place + 2 <= bytes,
                        "{gso_type} {bytes} {start} {offset}"
                    );
                    assert!(usize::from(got.hdr_len.get()) <= bytes);
                    assert_eq!((got.gso_size.get() == 0, got.hdr_len.get() < 42), {
                        let cut = gso_type != 0;
                        (!cut, !cut)
                    });
                }
            }
        }
    }
}
