//! What a back end keeps of what its front end has said: the same for every device.

use std::{collections::HashMap, fmt, sync::Arc};

use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::{PeerFd, notifier::Notifier, worker::Kick};
use ringfence_vhost_user::{HandlerError, RingSetup};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, device};

use crate::{RingLog, Translation};

/// What a front end has said that holds for longer than a ring runs.
#[derive(Default)]
pub struct FrontEnd {
    memory: Option<Arc<Memory>>,
    features: u64,
    calls: HashMap<u16, Arc<Notifier>>,
    errs: HashMap<u16, Arc<Notifier>>,
    log: Option<Arc<DirtyLog>>,
    warned: Warned,
}

/// What was warned of on a connection: a front end may say the same as often as it likes.
#[derive(Default)]
struct Warned {
    unsealed: bool,
    unmapped: bool,
}

/// The descriptors of a ring: what it is kicked with, where interrupts go, and where the front end
/// is told that it has failed.
pub struct Events {
    /// What its driver kicks it with; `None`: it is to be polled.
    pub kick: Option<Kick>,
    /// Where interrupts go.
    pub call: Option<Arc<Notifier>>,
    /// Where the front end learns that it has failed.
    pub err: Option<Arc<Notifier>>,
}

/// What a ring of any device starts with.
pub struct RingStart {
    /// Where it lies, and where it goes on.
    pub config: device::RingConfig,
    /// Its descriptors.
    pub events: Events,
    /// Whether it may work at once.
    pub enabled: bool,
    /// Where what it writes is marked.
    pub log: RingLog,
    /// It goes on at the used index, where a process has left it that is dead; the configuration's base says nothing.
    pub at_used: bool,
}

impl FrontEnd {
    /// The features that were settled on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether this feature is among them.
    pub fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }

    /// True if addresses mean something else from now on.
    pub fn set_features(&mut self, features: u64) -> bool {
        let before = std::mem::replace(&mut self.features, features);
        (before ^ features) & (1 << F_ACCESS_PLATFORM) != 0
    }

    /// The memory that was brought last.
    ///
    /// # Errors
    /// None was.
    pub fn memory(&self) -> Result<Arc<Memory>, HandlerError> {
        self.memory.clone().ok_or_else(|| HandlerError::new("there is no memory"))
    }

    /// New memory: what leads there, if it is translated, knows it from now on, and then the
    /// workers are to be told. What is wrong with it is said, in the name of the device `name`.
    ///
    /// # Errors
    /// As the translation says.
    pub fn set_memory(
        &mut self,
        name: &str,
        memory: &Arc<Memory>,
        translation: Option<&mut Translation>,
    ) -> Result<(), HandlerError> {
        self.warned.look_at(name, memory);
        if let Some(translation) = translation {
            translation.set_memory(memory)?;
        }
        self.memory = Some(Arc::clone(memory));
        Ok(())
    }

    /// What `ring` starts with.
    pub fn start(&self, ring: u16, setup: RingSetup) -> RingStart {
        let RingSetup { size, addresses, base, kick, enabled, resumed: _ } = setup;
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
        let kick = kick.map(Kick::from);
        let (call, err) = (self.calls.get(&ring).cloned(), self.errs.get(&ring).cloned());
        let translated = self.has(F_ACCESS_PLATFORM);
        let log = RingLog::new(self.log.clone(), self.memory.as_ref(), addresses.log, translated);
        let at_used = base.is_none();
        if let Some(call) = call.as_ref().filter(|_| at_used) {
            // Of what was given back last the driver may not have been told.
            call.notify();
        }
        RingStart { config, events: Events { kick, call, err }, enabled, log, at_used }
    }

    /// Keeps where writes are marked, for rings that start later.
    pub fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) {
        self.log = log.cloned();
    }

    /// Keeps where a ring's interrupts go, for its next start too.
    ///
    /// # Errors
    /// It cannot be notified without blocking: it is no eventfd, and no Unix stream.
    pub fn set_call(
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
    /// Says what is wrong with new memory.
    fn look_at(&mut self, name: &str, memory: &Memory) {
        if !memory.is_sealed() {
            say(
                &mut self.unsealed,
                name,
                format_args!("the memory's file can be truncated under us"),
            );
        }
        if let Some(region) = memory.unmapped().next() {
            let (count, gpa) = (memory.unmapped().count(), region.gpa);
            say(
                &mut self.unmapped,
                name,
                format_args!(
                    "{count} regions of memory, the first at {gpa:#x}, are in files of a disk or \
                     a network, whose pages may take long to come: they are not mapped, and accesses to \
                     them fail; use memory-backend-memfd, or a file of tmpfs or hugetlbfs"
                ),
            );
        }
    }
}

/// Warns, unless that was `said`.
fn say(said: &mut bool, source: &str, what: fmt::Arguments<'_>) {
    match std::mem::replace(said, true) {
        false => tracing::warn!(source = %source, "{what}"),
        true => tracing::debug!(source = %source, "{what}"),
    }
}

/// What a front end brings to be notified of a ring with.
///
/// # Errors
/// It cannot be notified without blocking: it is no eventfd, and no Unix stream.
pub fn of_ring(ring: u16, event: Option<PeerFd>) -> Result<Option<Notifier>, HandlerError> {
    let notifier = event.map(Notifier::new).transpose();
    notifier.map_err(|error| HandlerError::new(format!("the event of ring {ring}: {error}")))
}

/// Copies a part of a configuration space. Front ends ask for the whole of a later, longer layout:
/// what we do not have reads as 0, and of `config` there are 256 bytes at most.
///
/// # Errors
/// It lies past the 256 bytes that there can be.
pub fn read_config(config: &[u8], offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
    let mut space = [0; 256];
    let len = config.len().min(space.len());
    space[..len].copy_from_slice(&config[..len]);
    let from = offset as usize;
    let part = from.checked_add(out.len()).and_then(|end| space.get(from..end));
    out.copy_from_slice(part.ok_or_else(|| HandlerError::new("past the configuration space"))?);
    Ok(())
}
