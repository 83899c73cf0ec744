//! A back end's state from its front end's messages: the same for every device.

use std::{collections::HashMap, sync::Arc};

use ringfence_iotlb::Endpoint;
use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::{
    PeerFd,
    notifier::{Notifier, NotifierError},
    worker::Kick,
};
use ringfence_vhost_user::{HandlerError, RingSetup, Shutdown};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, device};

use crate::RingLog;

/// The front end's settings that outlive a run of a ring.
#[derive(Default)]
pub struct FrontEnd {
    memory: Option<Arc<Memory>>,
    features: u64,
    calls: HashMap<u16, Arc<Notifier>>,
    errs: HashMap<u16, Arc<Notifier>>,
    log: Option<Arc<DirtyLog>>,
    warned: Warned,
}

/// Which warnings a connection has caused: a front end may repeat the cause as often as it likes.
#[derive(Default)]
struct Warned([bool; 2]);

/// The descriptors of a ring: for kicks, for interrupts, and for signalling a failure to the front
/// end.
#[derive(Default)]
#[non_exhaustive]
pub struct Events {
    /// The driver's kicks; `None`: nothing wakes the worker for this ring.
    pub kick: Option<Kick>,
    /// The descriptor for interrupts.
    pub call: Option<Arc<Notifier>>,
    /// The descriptor that signals its failure to the front end.
    pub err: Option<Arc<Notifier>>,
}

/// What a ring of any device starts with, and how it reaches memory.
#[non_exhaustive]
pub struct RingStart {
    /// The memory.
    pub memory: Arc<Memory>,
    /// What translates addresses; `None`: they are guest-physical, and the ring's are the front end's
    /// own.
    pub endpoint: Option<Arc<Endpoint>>,
    /// The features that were negotiated.
    pub features: u64,
    /// The front end's connection, once it is served.
    pub shutdown: Option<Shutdown>,
    /// Its addresses, and where it goes on.
    pub config: device::RingConfig,
    /// Its descriptors.
    pub events: Events,
    /// Whether it may work at once.
    pub enabled: bool,
    /// Where its writes are marked.
    pub log: RingLog,
    /// It goes on at the used index, where a dead process has left it; the configuration's base is
    /// meaningless.
    pub at_used: bool,
    /// Whether it goes on from another process.
    pub resumed: bool,
}

impl FrontEnd {
    /// The features that were negotiated.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether this feature, a mask of one bit, was negotiated.
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Sets the features; true if that changes the meaning of addresses.
    pub fn set_features(&mut self, features: u64) -> bool {
        let before = std::mem::replace(&mut self.features, features);
        (before ^ features) & F_ACCESS_PLATFORM != 0
    }

    /// Sets new memory; the workers are to be updated afterwards. Warnings about the memory name
    /// the device `name`.
    pub fn set_memory(&mut self, name: &str, memory: &Arc<Memory>) {
        self.warned.look_at(name, memory);
        self.memory = Some(Arc::clone(memory));
    }

    /// What `ring` starts with, without an endpoint and a connection: these are the caller's to set.
    ///
    /// # Errors
    /// There is no memory.
    pub fn start(&self, ring: u16, setup: RingSetup) -> Result<RingStart, HandlerError> {
        let RingSetup { size, addresses, base, kick, enabled, resumed } = setup;
        let memory = self.memory.clone();
        let memory = memory.ok_or_else(|| HandlerError::new("there is no memory"))?;
        let config = device::RingConfig {
            size,
            desc: addresses.desc,
            avail: addresses.avail,
            used: addresses.used,
            event_idx: self.has(F_EVENT_IDX),
            indirect: self.has(F_INDIRECT_DESC),
            packed: self.has(F_RING_PACKED),
            base: base.unwrap_or(device::RingConfig::start(self.has(F_RING_PACKED))),
        };
        let kick = Some(kick.map_or_else(Kick::none, Kick::from));
        let (call, err) = (self.calls.get(&ring).cloned(), self.errs.get(&ring).cloned());
        let translated = self.has(F_ACCESS_PLATFORM);
        let log = RingLog::new(self.log.clone(), Some(&memory), addresses.log, translated);
        Ok(RingStart {
            memory,
            endpoint: None,
            features: self.features,
            shutdown: None,
            config,
            events: Events { kick, call, err },
            enabled,
            log,
            at_used: base.is_none(),
            resumed,
        })
    }

    /// Stores where writes are marked, for rings that start later.
    pub fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) {
        self.log = log.cloned();
    }

    /// Stores a ring's interrupt descriptor, for its next start too, and returns its notifier. Once
    /// the ring has it, notify it: an earlier interrupt may have had no descriptor, or one that was
    /// no longer read, and the driver waits for it.
    ///
    /// # Errors
    /// It cannot be notified without blocking: see [`NotifierError`].
    pub fn set_call(
        &mut self,
        ring: u16,
        call: Option<PeerFd>,
    ) -> Result<Option<Arc<Notifier>>, HandlerError> {
        keep(&mut self.calls, ring, call)
    }

    /// Stores the descriptor that signals a ring's failure, and returns its notifier.
    ///
    /// # Errors
    /// It cannot be notified without blocking: see [`NotifierError`].
    pub fn set_err(
        &mut self,
        ring: u16,
        err: Option<PeerFd>,
    ) -> Result<Option<Arc<Notifier>>, HandlerError> {
        keep(&mut self.errs, ring, err)
    }
}

fn keep(
    all: &mut HashMap<u16, Arc<Notifier>>,
    ring: u16,
    fd: Option<PeerFd>,
) -> Result<Option<Arc<Notifier>>, HandlerError> {
    let notifier = of_ring(ring, fd)?.map(Arc::new);
    match &notifier {
        Some(notifier) => all.insert(ring, Arc::clone(notifier)),
        None => all.remove(&ring),
    };
    Ok(notifier)
}

impl Warned {
    /// Warns about problems with new memory, or logs for debugging if that was done.
    fn look_at(&mut self, name: &str, memory: &Memory) {
        let unsealed = "the memory's file can be truncated by the front end".to_owned();
        let unmapped = memory.unmapped().next().map(|region| {
            let (count, gpa) = (memory.unmapped().count(), region.gpa);
            format!(
                "{count} regions of memory, the first at {gpa:#x}, are in files of a disk or a \
                 network, whose pages may take long to come: they are not mapped, and accesses to \
                 them fail; use memory-backend-memfd, or a file of tmpfs or hugetlbfs"
            )
        });
        let found = [(!memory.is_sealed()).then_some(unsealed), unmapped];
        for (warned, what) in self.0.iter_mut().zip(found) {
            match what {
                Some(what) if !std::mem::replace(warned, true) => {
                    tracing::warn!(source = %name, "{what}");
                }
                Some(what) => tracing::debug!(source = %name, "{what}"),
                None => {}
            }
        }
    }
}

/// The notifier for a descriptor that the front end brings for a ring.
///
/// # Errors
/// It cannot be notified without blocking: see [`NotifierError`].
pub fn of_ring(ring: u16, event: Option<PeerFd>) -> Result<Option<Notifier>, HandlerError> {
    let notifier = event.map(Notifier::new).transpose();
    Ok(notifier.map_err(|source| BadEvent { ring, source })?)
}

#[derive(Debug, thiserror::Error)]
#[error("the event of ring {ring}: {source}")]
struct BadEvent {
    ring: u16,
    source: NotifierError,
}

/// Copies a part of a configuration space. Front ends read the whole of a later, longer layout:
/// bytes beyond `config` read as 0, and only its first 256 bytes count.
///
/// # Errors
/// The part lies beyond the 256 bytes that there can be.
pub fn read_config(config: &[u8], offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
    let mut space = [0; 256];
    let len = config.len().min(space.len());
    space[..len].copy_from_slice(&config[..len]);
    let from = offset as usize;
    let part = from.checked_add(out.len()).and_then(|end| space.get(from..end));
    out.copy_from_slice(part.ok_or_else(|| HandlerError::new("past the configuration space"))?);
    Ok(())
}
