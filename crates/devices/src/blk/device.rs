//! A block device, as a back end sees it.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use ringfence_iotlb::{Endpoint, IotlbConfig};
use ringfence_mem::Memory;
use ringfence_run::worker::Worker;
use ringfence_vhost_user::{HandlerError, InflightRegion, Offer, ProtocolFeatures, Shutdown};
use ringfence_vhost_user_backend::{
    Addresses, Backend, Common, RawDevice, RingStart, read_config,
    requests::{MOST_LEFT, RequestRings},
};
use ringfence_virtq::{
    F_VERSION_1,
    blk::{BlkConfig, SECTOR, feature},
};
use zerocopy::{FromZeros, IntoBytes};

use super::{BlkFigures, BlkServer, BlkUnit, cache::Cache, request};
use crate::{
    disk::{Disk, Image, ImageError},
    iommu::{Iommu, IommuClient},
};

/// The most data buffers of a request: with header and status they make a chain of 256 descriptors.
const SEG_MAX: u32 = 254;
/// The most bytes of a data buffer. [`SEG_MAX`] buffers of this size do not exceed
/// [`request::MOST_MOVED`]. It must not be less: FreeBSD does not use a device whose buffers are
/// shorter than its longest request, 1 MiB.
const SIZE_MAX: u32 = 1 << 20;
const _: () = assert!(SEG_MAX as u64 * SIZE_MAX as u64 <= request::MOST_MOVED);

/// How long the stop of a ring waits for the disk if the data is in buffers of the service's own.
/// After that the connection ends without a reply: the disk does not use the guest's memory, but a
/// reply would mean that all requests of the ring are completed. (If the data is in the guest's
/// memory, the stop waits without limit: the memory is still in use.)
const STOPS_WITHIN: Duration = Duration::from_secs(20);

/// How a block device is set up.
#[derive(Clone)]
pub struct BlkOptions {
    /// The disk that it serves.
    pub disk: Disk,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The ID that drivers read (GET_ID), up to 20 bytes of it; also its name in the log.
    pub id: Arc<str>,
    /// How many queues it offers: at most 256, the rings that vhost-user can start.
    pub queues: u16,
    /// Its endpoint of an IOMMU in this process. With one, the device offers
    /// `VIRTIO_F_ACCESS_PLATFORM`.
    pub endpoint: Option<Arc<Endpoint>>,
    /// The IOMMU that the endpoint is behind, if it is to check each connection: the connection
    /// must belong to the IOMMU's guest, and its driver must accept that addresses are translated.
    pub iommu: Option<Arc<Iommu>>,
    /// Without an endpoint: an IOTLB for each connection, which its front end fills. The device
    /// offers `VIRTIO_F_ACCESS_PLATFORM` too.
    pub iotlb: Option<IotlbConfig>,
    /// The number of its units among a worker's.
    pub unit: u32,
    /// Its counters, made for as many queues.
    pub figures: Arc<BlkFigures>,
}

impl BlkOptions {
    /// A writable device without an IOMMU, as unit 0.
    pub fn new(disk: Disk, id: &str, queues: u16) -> BlkOptions {
        BlkOptions {
            disk,
            read_only: false,
            id: Arc::from(id),
            queues,
            endpoint: None,
            iommu: None,
            iotlb: None,
            unit: 0,
            figures: Arc::new(BlkFigures::new(queues)),
        }
    }
}

/// The largest ring, in descriptors.
const RING_SIZE: u16 = 1024;

/// Makes all io_urings that a device with this many queues may need, for a process that then gives
/// up the right to make them: one for each ring, one for each ring that may be
/// [stuck](BlkFigures::stuck) before no more rings are started, and one for each ring that has
/// requests at the disk at that moment.
///
/// # Errors
/// The kernel has no io_uring, or forbids it here.
pub fn make_rings(image: &Image, queues: u16) -> std::io::Result<()> {
    image.make_rings(MOST_LEFT + 2 * usize::from(queues), RING_SIZE)
}

/// A block device, for one connection.
pub struct Blk {
    options: BlkOptions,
    rings: RequestRings<BlkServer>,
    client: Option<IommuClient>,
    cache: Cache,
}

impl Blk {
    /// Makes the device a vhost-user back end, whose queues are spread over `workers` in turn.
    ///
    /// # Panics
    /// If there is no worker.
    pub fn backend(options: BlkOptions, workers: Arc<[Worker]>) -> Backend<Blk> {
        let addresses = match (&options.endpoint, options.iotlb) {
            (Some(endpoint), _) => Addresses::Behind(Arc::clone(endpoint)),
            (None, Some(config)) => Addresses::Iotlb(config),
            (None, None) => Addresses::Physical,
        };
        let (id, figures) = (Arc::clone(&options.id), Arc::clone(&options.figures));
        let device = Blk {
            rings: RequestRings::new(id, workers, options.unit, figures),
            client: options.iommu.as_ref().map(Iommu::client),
            options,
            cache: Cache::default(),
        };
        Backend::new(device, addresses)
    }

    /// Whether the stop of a ring, begun at `begun`, no longer waits for the disk.
    fn is_given_up(&self, begun: Instant, connection: Option<&Shutdown>) -> bool {
        self.rings.is_given_up(connection).unwrap_or_else(|| {
            let own = matches!(&self.options.disk, Disk::File(image) if image.has_own_buffers());
            own && begun.elapsed() >= STOPS_WITHIN
        })
    }

    fn take_image(&self, connection: Option<&Shutdown>) -> Result<(), HandlerError> {
        if let Disk::File(image) = &self.options.disk {
            let gone = || connection.is_some_and(Shutdown::is_over);
            image.take(gone)?;
        }
        Ok(())
    }
}

impl RawDevice for Blk {
    type Rings = BlkUnit;

    fn common(&self) -> Common<'_, BlkUnit> {
        self.rings.common()
    }

    fn offer(&self) -> Offer {
        let mut features = feature::SIZE_MAX
            | feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::CONFIG_WCE
            | feature::MQ;
        let holes = self.options.disk.holes();
        match self.options.read_only {
            true => features |= feature::RO,
            false => {
                features |= if holes.punch { feature::DISCARD } else { 0 };
                features |= if holes.punch || holes.zero { feature::WRITE_ZEROES } else { 0 };
            }
        }
        Offer {
            // A disk may lose what it could, as the kernel finds that out, or between two versions:
            // each such request is unsupported then.
            tolerated: feature::DISCARD | feature::WRITE_ZEROES,
            protocol: ProtocolFeatures::CONFIG | ProtocolFeatures::INFLIGHT_SHMFD,
            max_ring_size: RING_SIZE,
            ..Offer::new(features, self.options.queues)
        }
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        if features & F_VERSION_1 == 0 {
            return Err(HandlerError::new("VIRTIO_F_VERSION_1 is needed"));
        }
        self.client.iter().try_for_each(|client| client.set_features(features))?;
        self.cache.set_features(features);
        Ok(())
    }

    fn reset(&mut self) {
        self.cache.reset();
        self.rings.set_inflight(None);
    }

    fn set_memory(&mut self, memory: &Arc<Memory>) -> Result<(), HandlerError> {
        self.client.iter().try_for_each(|client| client.set_memory(memory))
    }

    fn start(&mut self, ring: u16, start: RingStart) -> Result<(), HandlerError> {
        if !start.resumed {
            self.client.iter().try_for_each(IommuClient::ring_starts)?;
        }
        let (through, shutdown) = (self.cache.through(), start.shutdown.clone());
        self.rings.start(ring, start, |size| {
            let BlkOptions { disk, read_only, id, .. } = &self.options;
            let serve = BlkServer::new((disk, *read_only), id, size, through)?;
            self.take_image(shutdown.as_ref())?;
            Ok(serve)
        })
    }

    fn stop(&mut self, ring: u16, connection: Option<&Shutdown>) -> Result<u32, HandlerError> {
        let begun = Instant::now();
        self.rings.stop(ring, || self.is_given_up(begun, connection))
    }

    fn forget(&mut self) {
        self.rings.forget();
    }

    /// Releases the image once the disk has completed the requests of the rings that have stopped.
    fn suspended(&mut self, connection: Option<&Shutdown>) {
        let Disk::File(image) = &self.options.disk else { return };
        let left = self.options.figures.left();
        // Ordering: a number that is looked at again until it is 0.
        let is_busy = move || left.load(Ordering::Acquire) > 0;
        let (begun, is_stuck) = (Instant::now(), is_busy());
        // Requests that the disk has not completed use no memory of the guest: only the lock
        // depends on them.
        let given_up =
            || is_stuck || begun.elapsed() >= STOPS_WITHIN || self.is_given_up(begun, connection);
        match image.release(is_busy, given_up) {
            Ok(()) => {}
            Err(ImageError::TimedOut) => {
                tracing::warn!(
                    source = %self.options.id,
                    "the image stays locked until the disk has completed its requests"
                );
            }
            Err(error) => tracing::error!(source = %self.options.id, "{error}: it stays locked"),
        }
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        let holes = self.options.disk.holes();
        let mut config = BlkConfig::new_zeroed();
        config.capacity.set(self.options.disk.len() / SECTOR);
        config.size_max.set(SIZE_MAX);
        config.seg_max.set(SEG_MAX);
        config.blk_size.set(SECTOR as u32);
        config.writeback = self.cache.read(offset, out.len());
        config.num_queues.set(self.options.queues);
        config.max_discard_sectors.set(request::MOST_ZEROED);
        config.max_discard_seg.set(1);
        config.discard_sector_alignment.set(holes.unit / SECTOR as u32);
        config.max_write_zeroes_sectors.set(request::MOST_ZEROED);
        config.max_write_zeroes_seg.set(1);
        config.write_zeroes_may_unmap = u8::from(holes.punch);
        read_config(config.as_bytes(), offset, out)
    }

    fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<(), HandlerError> {
        self.cache.write(offset, data)
    }

    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        self.cache.keep_in(Arc::clone(&inflight));
        self.rings.set_inflight(Some(inflight));
        Ok(())
    }
}
