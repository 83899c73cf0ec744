//! What a back end keeps of what its front end has said: the same for every device.

use std::{collections::HashMap, fmt, sync::Arc};

use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::{PeerFd, notifier::Notifier, worker::Kick};
use ringfence_vhost_user::{HandlerError, RingSetup};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_RING_PACKED, device};

use crate::{dirty::RingLog, translation::Translation};

/// What a front end has said that holds for longer than a ring runs.
#[derive(Default)]
pub(crate) struct FrontEnd {
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
pub(crate) struct Events {
    pub(crate) kick: Option<Kick>,
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
    /// It goes on at the used index, where a process has left it that is dead; the configuration's base says nothing.
    pub(crate) at_used: bool,
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
    /// workers are to be told. What is wrong with it is said, in the name of the device `name`.
    ///
    /// # Errors
    /// As the translation says.
    pub(crate) fn set_memory(
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
    pub(crate) fn start(&self, ring: u16, setup: RingSetup) -> RingStart {
        let RingSetup { size, addresses, base, kick, enabled, resumed: _ } = setup;
        let config = device::Config {
            size,
            desc: addresses.desc,
            avail: addresses.avail,
            used: addresses.used,
            event_idx: self.has(F_EVENT_IDX),
            indirect: self.has(F_INDIRECT_DESC),
            packed: self.has(F_RING_PACKED),
            base: base.unwrap_or(device::Config::start(self.has(F_RING_PACKED))),
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

/// What a front end gives to notify it of a ring with.
pub(crate) fn of_ring(ring: u16, event: Option<PeerFd>) -> Result<Option<Notifier>, HandlerError> {
    let notifier = event.map(Notifier::new).transpose();
    notifier.map_err(|error| HandlerError::new(format!("the event of ring {ring}: {error}")))
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use parking_lot::Mutex;
    use ringfence_iommu::{Geometry, PageSizes, Range, shootdown::Shootdown, table::Limits};
    use ringfence_iotlb::IotlbConfig;
    use ringfence_mem::{GuestRam, Region};
    use ringfence_run::worker::{Notify, Worker};
    use ringfence_vhost_user::Handler;
    use ringfence_virtio_iommu::device::Options;
    use tracing::{
        Event, Level, Metadata, Subscriber,
        span::{Attributes, Id, Record},
    };

    use super::*;
    use crate::{
        blk::{BlkBackend, BlkOptions},
        disk::{Disk, Ram},
        iommu::{Endpoints, IommuBackend, IommuOptions},
        net::{GRACE, Net, NetOptions, Way},
    };

    /// Keeps how loudly things were said here.
    #[derive(Default)]
    struct Said(Arc<Mutex<Vec<Level>>>);

    impl Subscriber for Said {
        fn enabled(&self, about: &Metadata<'_>) -> bool {
            module_path!().starts_with(about.target())
        }
        fn event(&self, event: &Event<'_>) {
            self.0.lock().push(*event.metadata().level());
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    fn workers() -> Arc<[Worker]> {
        [Worker::spawn("test", Notify::Sleep).unwrap()].into()
    }

    fn blk() -> Box<dyn Handler> {
        let ram = GuestRam::new(4096, 0).unwrap();
        let disk = Disk::Ram(Arc::new(Ram::map(ram.fd(), 4096).unwrap()));
        Box::new(BlkBackend::new(BlkOptions::new(disk, "disk", 1), workers()))
    }

    fn net() -> Box<dyn Handler> {
        let (name, way, iotlb) = ("net".into(), Way::Loopback, IotlbConfig::default());
        let (mac, mtu, iommu, grace) = (None, None, true, GRACE);
        let options = NetOptions { name, way, pairs: 1, mac, mtu, iommu, grace, iotlb };
        Box::new(Net::new(options, workers()).unwrap().connect(0))
    }

    fn iommu() -> Box<dyn Handler> {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let endpoints = Endpoints::new([], Shootdown::new(1), geometry, Limits::NONE);
        let options = IommuOptions { device: Options::default(), unit: 0 };
        Box::new(IommuBackend::new(Arc::new(endpoints), options, workers()))
    }

    #[test]
    fn whatever_the_device_a_connection_is_warned_once_of_memory_that_is_not_mapped() {
        let known = Memory::of_ram(&GuestRam::new(4096, 0).unwrap()).unwrap();
        let region = Region { gpa: 1 << 40, size: 4096, user_addr: 1 << 40, mmap_offset: 0 };
        let with_foreign = || known.with(region, File::open("/dev/zero").unwrap()).unwrap();
        for connect in [blk, net, iommu] {
            let said = Said::default();
            let levels = Arc::clone(&said.0);
            tracing::subscriber::with_default(said, || {
                for _ in 0..2 {
                    let mut connection = connect();
                    for (memory, level) in [
                        (Arc::clone(&known), None),
                        (with_foreign(), Some(Level::WARN)),
                        (with_foreign(), Some(Level::DEBUG)),
                        (Arc::clone(&known), None),
                        (with_foreign(), Some(Level::DEBUG)),
                    ] {
                        connection.set_memory(memory).unwrap();
                        assert_eq!(std::mem::take(&mut *levels.lock()), Vec::from_iter(level));
                    }
                }
            });
        }
    }
}
