//! A network device, as a back end sees it.

use std::{io, sync::Arc, time::Duration};

use ringfence_iotlb::{Endpoint, IotlbConfig};
use ringfence_mem::Memory;
use ringfence_run::worker::Worker;
use ringfence_sync::clock::nanos;
use ringfence_vhost_user::{HandlerError, Offer, ProtocolFeatures, Shutdown, msg::code};
use ringfence_vhost_user_backend::{
    Addresses, Backend, Common, IotlbTally, IotlbTotals, RawDevice, RingStart, Shares, read_config,
};
use tracing::debug;
use zerocopy::{FromZeros, IntoBytes};

use super::{
    round::{GRACE, Terms},
    stats::QueueCounters,
    unit::{Link, NetUnit, Start},
    wire::{LINK_UP, NetConfig, feature},
};
use crate::iommu::IommuClient;

/// The most pairs of queues whose rings vhost-user can start.
const MOST_PAIRS: usize = 128;

/// A network device as it is set up.
#[derive(Clone)]
pub struct NetOptions {
    /// Its name in messages.
    pub name: Arc<str>,
    /// Where packets go.
    pub link: Link,
    /// How many pairs of queues it offers: at most 128, whose rings vhost-user can start.
    pub pairs: u16,
    /// The number of its units among a worker's.
    pub unit: u32,
    /// The MAC address in its configuration space; `None`: none.
    pub mac: Option<[u8; 6]>,
    /// The MTU in its configuration space, in bytes; `None`: none.
    pub mtu: Option<u16>,
    /// Whether it offers `VIRTIO_F_ACCESS_PLATFORM`.
    pub iommu: bool,
    /// How long a receiver may be without buffers before packets are dropped; mostly
    /// [`GRACE`](super::GRACE).
    pub grace: Duration,
    /// What its device IOTLB may hold, and how long a packet waits for a translation.
    pub iotlb: IotlbConfig,
}

impl NetOptions {
    /// A device with one pair of queues and a device IOTLB, unit 0.
    pub fn new(name: impl Into<Arc<str>>, link: Link) -> NetOptions {
        NetOptions {
            name: name.into(),
            link,
            pairs: 1,
            unit: 0,
            mac: None,
            mtu: None,
            iommu: true,
            grace: GRACE,
            iotlb: IotlbConfig::default(),
        }
    }
}

/// A network device, or two that are back to back. It outlives its drivers.
pub struct Net {
    options: NetOptions,
    shares: Shares<NetUnit>,
    ends: Vec<End>,
}

/// What stays of one device when its driver changes.
#[derive(Default)]
struct End {
    /// By ring.
    counters: Vec<Arc<QueueCounters>>,
    tally: IotlbTally,
}

impl Net {
    /// A device with pairs of queues that are served by `workers`, in turn.
    ///
    /// # Errors
    /// There are more pairs than [may be](NetOptions::pairs), or than the tap has queues; no
    /// descriptor is left, or a worker is gone.
    ///
    /// # Panics
    /// If there is no worker.
    pub fn new(options: NetOptions, workers: Arc<[Worker]>) -> io::Result<Arc<Net>> {
        let most = match &options.link {
            Link::Tap(tap) => tap.queues.len().min(MOST_PAIRS),
            _ => MOST_PAIRS,
        };
        if usize::from(options.pairs) > most {
            let why = format!("{} pairs of queues, of which there may be {most}", options.pairs);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let unit = options.unit;
        let shares = Shares::new(workers, unit);
        for share in 0..shares.count() {
            let (link, pairs, grace) = (options.link.clone(), options.pairs, options.grace);
            let made = shares.on_worker(share, move |work| {
                work.insert(unit, Box::new(NetUnit::new(link, pairs, grace)?));
                io::Result::Ok(())
            });
            made.map_err(|error| io::Error::other(error.into_inner()))??;
        }
        let end = || End {
            counters: (0..2 * options.pairs).map(|_| Arc::default()).collect(),
            ..End::default()
        };
        let ends = (0..options.link.ends()).map(|_| end()).collect();
        Ok(Arc::new(Net { options, shares, ends }))
    }

    /// A back end for a driver of device `end` (0, or of two also 1). The one before it must be
    /// gone.
    pub fn connect(self: &Arc<Self>, end: usize) -> Backend<NetEnd> {
        let addresses = match self.options.iommu {
            true => Addresses::Iotlb(self.options.iotlb),
            false => Addresses::Physical,
        };
        Backend::new(self.end(end, None), addresses)
    }

    fn end(self: &Arc<Self>, end: usize, client: Option<IommuClient>) -> NetEnd {
        let name = match self.ends.len() {
            1 => Arc::clone(&self.options.name),
            _ => format!("{} {end}", self.options.name).into(),
        };
        NetEnd { net: Arc::clone(self), name, end, client }
    }

    /// As [`connect`](Self::connect), behind an IOMMU of this process: addresses mean what they mean
    /// to `endpoint`, whose shootdown has a place for each worker. No misses are sent to the front
    /// end, and its IOTLB messages change nothing. With a `client`, only front ends of the IOMMU's
    /// guest are accepted, and only with translated addresses.
    pub fn connect_behind(
        self: &Arc<Self>,
        end: usize,
        endpoint: Arc<Endpoint>,
        client: Option<IommuClient>,
    ) -> Backend<NetEnd> {
        Backend::new(self.end(end, client), Addresses::Behind(endpoint))
    }

    /// The options it was made with.
    pub fn options(&self) -> &NetOptions {
        &self.options
    }

    /// What the rings of device `end` count, by their number: pair n receives in ring 2 n and sends
    /// in ring 2 n + 1.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn counters(&self, end: usize) -> &[Arc<QueueCounters>] {
        &self.ends[end].counters
    }

    /// What the IOTLBs of device `end` have counted.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn iotlb(&self, end: usize) -> IotlbTotals {
        self.ends[end].tally.totals()
    }
}

/// One of the devices of a [`Net`], for one driver.
pub struct NetEnd {
    net: Arc<Net>,
    /// In messages.
    name: Arc<str>,
    end: usize,
    client: Option<IommuClient>,
}

impl RawDevice for NetEnd {
    type Rings = NetUnit;

    fn common(&self) -> Common<'_, NetUnit> {
        let (shares, tally) = (&self.net.shares, &self.net.ends[self.end].tally);
        Common { name: &self.name, shares, part: self.end, tally, bells: None }
    }

    /// A pair is one worker's.
    fn share_of(&self, ring: u16) -> usize {
        usize::from(ring / 2)
    }

    fn offer(&self) -> Offer {
        let NetOptions { pairs, mac, mtu, link, .. } = &self.net.options;
        let mut features = feature::MRG_RXBUF | feature::STATUS | link.offloads();
        for (offered, bit) in [
            (*pairs > 1, feature::MQ),
            (mac.is_some(), feature::MAC),
            (mtu.is_some(), feature::MTU),
        ] {
            features |= if offered { bit } else { 0 };
        }
        let mut protocol = ProtocolFeatures::RARP | ProtocolFeatures::NET_MTU;
        // QEMU reads its driver's configuration space itself and warns of a back end that has one. A front end
        // that has no IOMMU for its drivers leaves it to the back end, as User-Mode Linux does.
        protocol.set(ProtocolFeatures::CONFIG, !self.net.options.iommu);
        // As large as DPDK's drivers make them.
        Offer { protocol, max_ring_size: 4096, ..Offer::new(features, 2 * pairs) }
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        self.client.iter().try_for_each(|client| client.set_features(features))?;
        debug!(source = %self.name, "features {features:#x}");
        Ok(())
    }

    fn set_memory(&mut self, memory: &Arc<Memory>) -> Result<(), HandlerError> {
        self.client.iter().try_for_each(|client| client.set_memory(memory))
    }

    fn start(&mut self, ring: u16, start: RingStart) -> Result<(), HandlerError> {
        if !start.resumed {
            self.client.iter().try_for_each(IommuClient::ring_starts)?;
        }
        let timeout_ns = nanos(self.net.options.iotlb.timeout);
        let start = Start {
            terms: Terms { features: start.features, timeout_ns },
            ring: start,
            counters: Arc::clone(&self.net.ends[self.end].counters[usize::from(ring)]),
            name: Arc::clone(&self.name),
        };
        let (end, share) = (self.end, self.share_of(ring));
        let started = self.net.shares.on(share, move |unit| unit.start(end, ring, start))?;
        let started = started.ok_or_else(|| HandlerError::new("the device has ended"))?;
        if let Some(view) = started? {
            self.net.ends[self.end].tally.view(view);
        }
        Ok(())
    }

    fn stop(&mut self, ring: u16, _: Option<&Shutdown>) -> Result<u32, HandlerError> {
        let (end, share) = (self.end, self.share_of(ring));
        let stopped = self.net.shares.on(share, move |unit| unit.stop(end, ring))?.flatten();
        let (next, _) = stopped.ok_or_else(|| HandlerError::new("the ring is not running"))?;
        next.ok_or_else(|| HandlerError::new("the ring was never found: its index is unknown"))
    }

    fn forget(&mut self) {
        let end = self.end;
        // A worker that is gone has nothing any more.
        let _ = self.net.shares.on_all(move |unit| unit.forget(end));
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        let NetOptions { pairs, mac, mtu, .. } = &self.net.options;
        let mut config = NetConfig::new_zeroed();
        config.mac = mac.unwrap_or_default();
        config.status.set(LINK_UP);
        config.max_virtqueue_pairs.set(*pairs);
        config.mtu.set(mtu.unwrap_or_default());
        config.speed.set(u32::MAX);
        config.duplex = u8::MAX;
        read_config(config.as_bytes(), offset, out)
    }

    fn refused(&self, request: u32, why: &HandlerError) {
        tracing::warn!(source = %self.name, "{} was refused: {why}", code::name(request));
    }

    fn send_rarp(&mut self, mac: [u8; 6], features: u64) -> Result<(), HandlerError> {
        // Between two drivers no switch needs to learn it.
        if let Link::Tap(tap) = &self.net.options.link {
            tap.announce(mac, Terms { features, timeout_ns: 0 })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ringfence_run::worker::Notify;

    use super::*;

    #[test]
    fn more_pairs_than_can_be_started_are_refused() {
        for pairs in [129, u16::MAX] {
            let workers = Arc::new([Worker::spawn("test", Notify::Sleep).unwrap()]);
            let options = NetOptions { pairs, ..NetOptions::new("test", Link::Loopback) };
            let refused = Net::new(options, workers).map(drop).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
