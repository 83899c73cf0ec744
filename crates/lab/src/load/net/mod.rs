//! A vhost-user front end and a virtio-net driver in one process, to load back ends and to check
//! what they do.
//!
//! | file | what it holds |
//! |---|---|
//! | `space.rs` | the memory, and the addresses by which the device sees it |
//! | `link.rs` | the sockets; misses and their updates |
//! | `pipe.rs` | IOTLB messages in flight |
//! | `ring.rs` | one ring: its queue, and which of its buffers are free |
//! | `side.rs` | one ring with its buffers |
//! | `arrivals.rs` | what came, what was lost, what was wrong |
//!
//! One thread does everything: it sends, receives, and looks between bursts for misses of the back
//! end. So nothing but the back end runs beside it.

mod arrivals;
pub(crate) mod link;
mod pipe;
pub(crate) mod ring;
mod side;
pub(crate) mod space;

use std::os::unix::net::UnixStream;

use anyhow::Result;
use ringfence_virtq::{
    F_ACCESS_PLATFORM, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1, driver::QueueConfig,
};

pub use arrivals::{Arrivals, Expect};
pub use ringfence_devices::net::frame::{FRAME, HEADER, PACKET, number, one_buffer, packet};
pub use space::{Addressing, Entry};

use link::Link;
use side::Side;
use space::Space;

/// Descriptors of a ring, as QEMU gives a device.
pub const RING: u16 = 256;

/// VIRTIO_NET_F_MRG_RXBUF (bit 15): a packet may take several receive buffers.
const F_MRG_RXBUF: u64 = 1 << 15;

/// The numbers of the first queue pair's rings.
const RX: u16 = 0;
const TX: u16 = 1;

/// The names of the features that the drivers here request.
fn names(features: u64) -> String {
    let all = [
        (F_MRG_RXBUF, "MRG_RXBUF"),
        (F_INDIRECT_DESC, "INDIRECT_DESC"),
        (F_VERSION_1, "VERSION_1"),
        (F_ACCESS_PLATFORM, "ACCESS_PLATFORM"),
        (F_RING_PACKED, "RING_PACKED"),
    ];
    let there = all.iter().filter(|(bit, _)| features & bit != 0);
    there.map(|(_, name)| *name).collect::<Vec<_>>().join(", ")
}

/// How to drive a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The addresses by which the device sees memory.
    pub addressing: Addressing,
    /// Descriptors of each ring.
    pub ring: u16,
    /// Receive buffers, which take turns; at least as many as `ring`.
    pub rx_buffers: u32,
    /// Transmit buffers, likewise.
    pub tx_buffers: u32,
    /// Packed rings.
    pub packed: bool,
    /// Whether all lasting translations are sent at the beginning; otherwise the back end sends a
    /// miss for each.
    pub prefill: bool,
}

/// What happened on the sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Messages {
    /// Misses that the back end has sent.
    pub misses: u64,
    /// UPDATEs that were sent.
    pub updates: u64,
    /// INVALIDATEs that were sent.
    pub invalidations: u64,
}

/// One queue pair of a network device.
#[derive(Debug)]
pub struct NetDriver {
    link: Link,
    rx: Side,
    tx: Side,
    /// What arrived.
    pub arrivals: Arrivals,
    /// Packets that the device has taken from the transmit ring.
    pub taken: u64,
}

impl NetDriver {
    /// Brings a device up: features, memory, both rings, and all receive buffers in theirs.
    ///
    /// # Errors
    /// The system has no memory, or the back end hung up, or offers too little, or broke a ring.
    ///
    /// # Panics
    /// If the options make no sense: a ring's size or an entry's is no power of two.
    pub fn open(stream: UnixStream, options: Options, expect: Expect) -> Result<NetDriver> {
        let Options { addressing, ring, rx_buffers, tx_buffers, packed, prefill } = options;
        let buffers = rx_buffers.saturating_add(tx_buffers);
        let space = Space::new(addressing, buffers, false)?;
        let config = QueueConfig { size: ring, event_idx: false, packed };
        let mut link = Link::open(stream, F_MRG_RXBUF, packed, space)?;
        let mut rx = Side::start(&mut link, RX, config, 0..rx_buffers)?;
        let tx = Side::start(&mut link, TX, config, rx_buffers..buffers)?;
        if prefill {
            link.prefill(buffers)?;
        }
        rx.post(&mut link)?;
        link.pipe.settle()?;
        rx.post(&mut link)?;
        Ok(NetDriver { link, rx, tx, arrivals: Arrivals::new(expect), taken: 0 })
    }

    /// Sends up to `most` frames, numbered on from those before; returns how many. Fewer if the ring
    /// is full.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    #[inline]
    pub fn send(&mut self, most: usize) -> Result<usize> {
        self.taken += self.tx.reclaim(&mut self.link, |_, _| {})?;
        let sent = self.tx.send(&mut self.link, self.arrivals.sent, most)?;
        self.arrivals.sent += sent as u64;
        Ok(sent)
    }

    /// Takes what has arrived, checks every byte of it, and makes its buffers available again;
    /// returns how many packets that were.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    #[inline]
    pub fn receive(&mut self) -> Result<usize> {
        let arrivals = &mut self.arrivals;
        let came = self.rx.reclaim(&mut self.link, |packet, len| arrivals.note(packet, len))?;
        self.rx.post(&mut self.link)?;
        Ok(came as usize)
    }

    /// Sends pending UPDATEs and INVALIDATEs and serves the misses that have come; returns how many
    /// misses these were. To be called often if there is an IOMMU: with fresh addresses nothing
    /// proceeds without this.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    pub fn serve_misses(&mut self) -> Result<u64> {
        self.link.serve_misses()
    }

    /// How many more frames can be sent so that each finds a receive buffer, were they all to come
    /// back.
    #[inline]
    pub fn window(&self) -> usize {
        self.rx.in_flight().saturating_sub(self.arrivals.outstanding() as usize)
    }

    /// Frames that are in the transmit ring.
    pub fn queued(&self) -> usize {
        self.tx.in_flight()
    }

    /// What happened on the sockets.
    pub fn messages(&self) -> Messages {
        self.link.pipe.messages
    }

    /// Sends `count` UPDATEs of a page, at most `depth` of them in flight, and waits for the
    /// replies: what messages cost. Only behind an IOMMU.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    pub fn round_trips(&mut self, count: u64, depth: u64) -> Result<()> {
        let Link { space, pipe, .. } = &mut self.link;
        let entry = space.mapped(space.device_addr(0))?;
        for _ in 0..count.div_ceil(depth.max(1)) {
            (0..depth).for_each(|_| _ = pipe.update(entry));
            pipe.settle()?;
        }
        Ok(())
    }

    /// Stops both rings. What is in them is forgotten.
    ///
    /// # Errors
    /// The back end hung up, or broke a ring.
    pub fn stop(mut self) -> Result<()> {
        [TX, RX].into_iter().try_for_each(|ring| self.link.stop_ring(ring))
    }
}
