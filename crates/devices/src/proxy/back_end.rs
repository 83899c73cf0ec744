//! The back end behind a proxy, for one connection.

use std::{io, os::fd::AsFd, sync::Arc};

use ringfence_mem::{GuestRam, MemError, PAGE_SIZE, Region};
use ringfence_run::{
    PeerFd, event,
    notifier::{Notifier, NotifierError},
    worker::Kick,
};
use ringfence_vhost_user::{
    F_PROTOCOL_FEATURES, Frontend, FrontendError, Offer, ProtocolFeatures, RingAddresses,
};
use ringfence_virtq::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, F_VERSION_1, RingError,
    device::RingConfig,
    driver::{self, QueueConfig, Rings},
};

use super::{
    connector::{Connected, REPLIES_WITHIN, Watched},
    slots::Slots,
};

/// Where the back end sees its memory. (Not at 0, which some take for an error; and nothing of this
/// process's own addresses.)
const FIRST: u64 = 1 << 30;
/// The largest ring.
const RING_SIZE: u16 = 1024;
/// The bytes of a shadow ring of that size, of either format.
const RING_BYTES: usize = 64 << 10;
/// The features of rings and transports, which the proxy negotiates itself on either side.
const OF_RINGS: u64 = 0x3_ffff_ff00_0000;
/// The protocol features that it can pass on.
const PASSED: ProtocolFeatures = ProtocolFeatures::CONFIG.union(ProtocolFeatures::RARP);
/// Some of those that it cannot: what they are, and why.
const WITHHELD: [(u32, &str); 4] = [
    (8, "postcopy: the proxy would wait for pages that have not come"),
    (10, "descriptors of its own, as for DAX windows: the guest would share memory with it"),
    (11, "doorbells of its own: the guest would write to it directly"),
    (18, "shared objects: other devices would share memory with it"),
];

/// Why a back end cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackEndError {
    /// It refuses a message, or does not follow the protocol.
    #[error("the back end: {0}")]
    Protocol(#[from] FrontendError),
    /// It lacks a feature.
    #[error("the back end does not offer {0}, without which no proxy can stand before it")]
    Lacks(&'static str),
    /// Its memory cannot be made.
    #[error("memory for the back end: {0}")]
    Memory(#[from] MemError),
    /// A shadow ring cannot be made.
    #[error("the shadow ring: {0}")]
    Ring(#[from] RingError),
    /// No descriptor can be made.
    #[error("events for the back end: {0}")]
    Event(#[from] io::Error),
    /// No event of the back end's can be signalled.
    #[error("events for the back end: {0}")]
    Notifier(#[from] NotifierError),
}

type Result<T> = std::result::Result<T, BackEndError>;

/// What a ring needs to be served by the back end.
pub(super) struct Shadowed {
    pub(super) ring: driver::Queue,
    pub(super) slots: Slots,
    pub(super) kick: Notifier,
    pub(super) call: Kick,
}

/// A back end, and the memory that it has.
pub(super) struct BackEnd {
    link: Frontend,
    ram: Arc<GuestRam>,
    pool_size: u64,
    pub(super) offered: u64,
    protocol: ProtocolFeatures,
    queue_num: u16,
    /// How many rings it has memory for.
    rings: u16,
    /// The features of its rings.
    features: u64,
    /// Whether it has its memory.
    is_set_up: bool,
}

impl BackEnd {
    /// Begins with a back end on a connected socket: at most `queues` rings, each with `pool_size`
    /// bytes of slots. `name` stands in the log. Returns what to watch, too.
    pub(super) fn new(
        name: &str,
        (stream, channel, theirs): Connected,
        queues: u16,
        pool_size: u64,
    ) -> Result<(BackEnd, Watched)> {
        let hang_up = PeerFd::new(stream.as_fd().try_clone_to_owned()?, stream.closer());
        let mut link = Frontend::new(stream, REPLIES_WITHIN);
        link.set_owner()?;
        let offered = link.features()?;
        for (feature, name) in
            [(F_PROTOCOL_FEATURES, "protocol features"), (F_VERSION_1, "VERSION_1")]
        {
            if offered & feature == 0 {
                return Err(BackEndError::Lacks(name));
            }
        }
        let wanted = PASSED
            | ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::MQ
            | ProtocolFeatures::RESET_DEVICE
            | ProtocolFeatures::BACKEND_REQ;
        let can = link.protocol_features()?;
        let protocol = can & wanted;
        for (_, what) in WITHHELD.iter().filter(|(bit, _)| can.bits() & 1 << bit != 0) {
            tracing::info!(source = name, "the back end offers and the guest does not get {what}");
        }
        link.set_protocol_features(protocol)?;
        // Without MQ it does not say. A network, a disk and the like have no more.
        let many = protocol.contains(ProtocolFeatures::MQ);
        let queue_num = if many { link.queue_num()? } else { 2 };
        // Not more, unless it counts pairs and does not count the ring that controls them: one that locks
        // its memory takes all that it is given, and until it has zeroed that it replies to nothing.
        let rings = queue_num.saturating_mul(2).saturating_add(1).min(queues);
        let queue_num = queue_num.min(queues);
        let speaks = protocol.contains(ProtocolFeatures::BACKEND_REQ);
        if speaks {
            link.set_backend_channel(theirs.as_fd())?;
        }
        let watched = Watched { hang_up, channel: speaks.then_some(channel) };
        let pool_size = pool_size.max(1).next_multiple_of(PAGE_SIZE as u64);
        let bytes = usize::from(rings.max(1)) * (RING_BYTES + pool_size as usize);
        let ram = GuestRam::new(bytes, FIRST)?;
        let (features, is_set_up) = (0, false);
        let back = BackEnd {
            link,
            ram,
            pool_size,
            offered,
            protocol,
            queue_num,
            rings,
            features,
            is_set_up,
        };
        Ok((back, watched))
    }

    /// All memory that it can have.
    pub(super) fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// What its kind of device offers, as far as a proxy can pass it on.
    pub(super) fn offer(&self) -> Offer {
        Offer {
            protocol: self.protocol & PASSED | ProtocolFeatures::INFLIGHT_SHMFD,
            // As it counts them: pairs of rings, if it is a network of DPDK's.
            queue_num: self.queue_num,
            max_ring_size: RING_SIZE,
            ..Offer::new(self.offered & !OF_RINGS, self.rings)
        }
    }

    /// Sets what the driver has accepted of [`offer`](Self::offer), while no ring runs.
    pub(super) fn set_features(&mut self, features: u64) -> Result<()> {
        let rings =
            F_PROTOCOL_FEATURES | F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX | F_RING_PACKED;
        self.features = self.offered & (features & !OF_RINGS | rings);
        self.link.set_features(self.features)?;
        Ok(())
    }

    /// Whether it takes chains with tables.
    pub(super) fn indirect(&self) -> bool {
        self.has(F_INDIRECT_DESC)
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Starts a ring at the back end, as large as a ring of `size`.
    pub(super) fn start(&mut self, ring: u16, size: u16) -> Result<Shadowed> {
        if !self.is_set_up {
            // One region, and no address of this process in it.
            let region = Region {
                gpa: FIRST,
                size: self.ram.len() as u64,
                user_addr: FIRST,
                mmap_offset: 0,
            };
            self.link.set_mem_table(&[(region, self.ram.fd())])?;
            self.is_set_up = true;
        }
        let at = usize::from(ring) * (RING_BYTES + self.pool_size as usize);
        let config = QueueConfig {
            size: size.next_power_of_two(),
            event_idx: self.has(F_EVENT_IDX),
            packed: self.has(F_RING_PACKED),
        };
        let area = self.ram.window(at, RING_BYTES)?;
        area.slice().fill_zero();
        let shadow = driver::Queue::with_config(config, Rings::placed(&area, &config)?)?;
        let (pool, pool_size) = (at + RING_BYTES, self.pool_size as usize);
        // With nothing of an earlier ring in it.
        self.ram.discard(pool, pool_size)?;
        let slots = Slots::new(self.ram.window(pool, pool_size)?, FIRST + pool as u64, size);
        let [kick, call] = [event::new()?, event::new()?];
        let notifier = Notifier::new(PeerFd::from(kick.try_clone()?))?;
        let (places, first) = (config.offsets(), FIRST + at as u64);
        let [desc, avail, used] =
            [places.desc, places.avail, places.used].map(|offset| first + offset as u64);
        self.link.set_vring_num(ring, config.size)?;
        self.link.set_vring_base(ring, RingConfig::start(config.packed))?;
        self.link.set_vring_addr(ring, &RingAddresses { desc, avail, used, log: None })?;
        self.link.set_vring_call(ring, Some(call.as_fd()))?;
        self.link.set_vring_kick(ring, Some(kick.as_fd()))?;
        Ok(Shadowed { ring: shadow, slots, kick: notifier, call: Kick::from(call) })
    }

    /// Enables or disables a ring.
    pub(super) fn enable(&mut self, ring: u16, enabled: bool) -> Result<()> {
        Ok(self.link.set_vring_enable(ring, enabled)?)
    }

    /// Stops a ring: the back end completes what it has begun.
    pub(super) fn stop(&mut self, ring: u16) -> Result<()> {
        self.link.get_vring_base(ring)?;
        Ok(())
    }

    pub(super) fn reset(&mut self) -> Result<()> {
        self.is_set_up = false;
        if self.protocol.contains(ProtocolFeatures::RESET_DEVICE) {
            self.link.reset_device()?;
        }
        Ok(())
    }

    pub(super) fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<()> {
        Ok(self.link.config(offset, out)?)
    }

    pub(super) fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<()> {
        Ok(self.link.set_config(offset, data)?)
    }

    pub(super) fn send_rarp(&mut self, mac: [u8; 6]) -> Result<()> {
        Ok(self.link.send_rarp(mac)?)
    }
}
