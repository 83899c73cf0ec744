//! The device process with a network device behind its virtio-iommu, and the driver's side of it.

use std::os::{fd::AsFd, unix::net::UnixStream};

use anyhow::{Context, Result};
use ringfence_dma::{BounceConfig, BounceLimits, DmaConfig, Written};
use ringfence_drivers::ram::PagedBuffer;
use ringfence_run::{event, worker::Notify};
use ringfence_vhost_user::ProtocolFeatures;
use ringfence_virtio_iommu::driver::ViommuDomain;
use ringfence_virtq::driver::{Queue, QueueConfig, Rings};

use super::Mapped;
use crate::{
    load::net::RING,
    run::{
        link::scatter,
        space::Space,
        viommu::{Behind, Setup, front_end, start_ring},
    },
};

/// VIRTIO_NET_F_MRG_RXBUF (bit 15).
const F_MRG_RXBUF: u64 = 1 << 15;
/// Buffers of each ring, of a page each.
const BUFFERS: usize = 1024;
const PAGE: usize = 4096;
/// Guest memory for bounce slots.
const POOLS: usize = 64 << 20;

/// The queue of a ring, and its bundles: the pages that are mapped together.
pub(super) type Parts = (Queue, Vec<PagedBuffer>);

/// Brings up a device, which `peer` serves at two sockets, and its IOMMU; returns the parts of its receive
/// ring and of its transmit ring.
pub(super) fn open<P>(
    mapped: Mapped,
    peer: impl FnOnce(UnixStream, UnixStream) -> Result<P>,
) -> Result<(Behind<P>, [Parts; 2])> {
    let config = QueueConfig { size: RING, event_idx: false, packed: false };
    let ring_bytes = config.offsets().len.next_multiple_of(PAGE);
    let max_bytes = if mapped.policy.bounces() { POOLS as u64 } else { 0 };
    let bounce = BounceConfig { written: Written::Reported, ..BounceConfig::default() };
    let setup = Setup {
        name: "device",
        bytes: 2 * (BUFFERS * PAGE + ring_bytes),
        config: DmaConfig { bounce, ..DmaConfig::new(mapped.policy) },
        limits: BounceLimits { max_bytes, ..BounceLimits::default() },
        notify: Notify::Poll,
        lazy: false,
    };
    let allocator = |domain: &ViommuDomain| {
        Space::default().of_domain(Default::default(), domain, &[], mapped.policy.is_lazy())
    };
    let start = |iommu| {
        let (front, net) = front_end()?;
        Ok((peer(net, iommu).context("starting a device process")?, front))
    };
    let mut link = Behind::open(setup, allocator, start)?;
    link.agree(F_MRG_RXBUF, ProtocolFeatures::MQ, "network device")?;
    let mut queue = |index| -> Result<Queue> {
        let (window, _, base) = link.ring_memory(ring_bytes)?;
        let mut queue = Queue::with_config(config, Rings::placed(&window, &config)?)?;
        // Both ends poll.
        queue.suppress_notifications();
        start_ring(&mut link.front, index, RING, base, event::new()?.as_fd(), None)
            .with_context(|| format!("starting ring {index}"))?;
        Ok(queue)
    };
    let (receive, transmit) = (queue(0)?, queue(1)?);
    let bundles = BUFFERS / mapped.bundle;
    let mut own = scatter(&link.ram, &vec![mapped.bundle * PAGE; 2 * bundles], mapped.run)?;
    let sent = own.split_off(bundles);
    Ok((link, [(receive, own), (transmit, sent)]))
}
