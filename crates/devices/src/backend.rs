//! What a back end keeps of what its front end has said: the same for every device.

use std::{collections::HashMap, os::fd::OwnedFd, sync::Arc};

use ringfence_mem::{DirtyLog, Memory};
use ringfence_vhost_user::{HandlerError, PeerFd, RingSetup};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, device};

use crate::{
    dirty::RingLog,
    notifier::{self, Notifier},
    translation::Translation,
};

/// What a front end has said that holds for longer than a ring runs.
#[derive(Default)]
pub(crate) struct FrontEnd {
    memory: Option<Arc<Memory>>,
    features: u64,
    calls: HashMap<u16, Arc<Notifier>>,
    errs: HashMap<u16, Arc<Notifier>>,
    log: Option<Arc<DirtyLog>>,
}

/// The descriptors of a ring: what it is kicked with, where interrupts go, and where the front end
/// is told that it has failed.
pub(crate) struct Events {
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) call: Option<Arc<Notifier>>,
    pub(crate) err: Option<Arc<Notifier>>,
}

/// What a ring of any device starts with.
pub(crate) struct RingStart {
    pub(crate) config: device::Config,
    pub(crate) events: Events,
    /// Whether it may work at once.
    pub(crate) enabled: bool,
    pub(crate) log: RingLog,
}

impl FrontEnd {
    /// The features that were settled on.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    pub(crate) fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }

    /// True if addresses mean something else from now on.
    pub(crate) fn set_features(&mut self, features: u64) -> bool {
        let before = std::mem::replace(&mut self.features, features);
        (before ^ features) & (1 << F_ACCESS_PLATFORM) != 0
    }

    /// # Errors
    /// None was announced.
    pub(crate) fn memory(&self) -> Result<Arc<Memory>, HandlerError> {
        self.memory.clone().ok_or_else(|| HandlerError::new("there is no memory"))
    }

    /// New memory: what leads there, if it is translated, knows it from now on, and then the
    /// workers are to be told.
    ///
    /// # Errors
    /// As the translation says.
    pub(crate) fn set_memory(
        &mut self,
        memory: &Arc<Memory>,
        translation: Option<&mut Translation>,
    ) -> Result<(), HandlerError> {
        if let Some(translation) = translation {
            translation.set_memory(memory)?;
        }
        self.memory = Some(Arc::clone(memory));
        Ok(())
    }

    /// What `ring` starts with.
    pub(crate) fn start(&self, ring: u16, setup: RingSetup) -> RingStart {
        let RingSetup { size, addresses, base, kick, enabled } = setup;
        let config = device::Config {
            size,
            desc: addresses.desc,
            avail: addresses.avail,
            used: addresses.used,
            event_idx: self.has(F_EVENT_IDX),
            indirect: self.has(F_INDIRECT_DESC),
            packed: self.has(F_RING_PACKED),
            base,
        };
        let (call, err) = (self.calls.get(&ring).cloned(), self.errs.get(&ring).cloned());
        let translated = self.has(F_ACCESS_PLATFORM);
        let log = RingLog::new(self.log.clone(), self.memory.as_ref(), addresses.log, translated);
        RingStart { config, events: Events { kick, call, err }, enabled, log }
    }

    /// Keeps where writes are marked, for rings that start later.
    pub(crate) fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) {
        self.log = log.cloned();
    }

    /// Keeps where a ring's interrupts go, for its next start too.
    ///
    /// # Errors
    /// It cannot be notified without blocking: it is no eventfd, and no Unix stream.
    pub(crate) fn set_call(
        &mut self,
        ring: u16,
        call: Option<PeerFd>,
    ) -> Result<Option<Arc<Notifier>>, HandlerError> {
        keep(&mut self.calls, ring, call)
    }

    /// Keeps where a ring's failure is told.
    ///
    /// # Errors
    /// It cannot be notified without blocking: it is no eventfd, and no Unix stream.
    pub(crate) fn set_err(
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
    let notifier = notifier::of_ring(ring, fd)?.map(Arc::new);
    match &notifier {
        Some(notifier) => all.insert(ring, Arc::clone(notifier)),
        None => all.remove(&ring),
    };
    Ok(notifier)
}

/// Says what there is to be said of new memory.
pub(crate) fn warn_of(name: &str, memory: &Memory) {
    if !memory.is_sealed() {
        tracing::warn!("{name}: the memory's file can be truncated under us");
    }
    if let Some(region) = memory.unmapped().next() {
        let (count, gpa) = (memory.unmapped().count(), region.gpa);
        tracing::warn!(
            "{name}: {count} regions of memory, the first at {gpa:#x}, are in files of a disk or a network, \
             whose pages may take long to come: they are not mapped, and accesses to them fail; use \
             memory-backend-memfd, or a file of tmpfs or hugetlbfs"
        );
    }
}

/// Copies a part of a configuration space. Front ends ask for the whole of a later, longer layout:
/// what we do not have reads as 0.
///
/// # Errors
/// It lies past the 256 bytes that there can be.
pub(crate) fn read_config(config: &[u8], offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
    let mut space = [0; 256];
    space[..config.len()].copy_from_slice(config);
    let from = offset as usize;
    let part = from.checked_add(out.len()).and_then(|end| space.get(from..end));
    out.copy_from_slice(part.ok_or_else(|| HandlerError::new("past the configuration space"))?);
    Ok(())
}
