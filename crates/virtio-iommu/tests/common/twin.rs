//! The device and its model side by side: both get the same requests, and after each request all
//! observable state is compared.

use std::{collections::BTreeMap, sync::Arc};

use ringfence_iommu::{PageSizes, Prot, table::Limits};
use ringfence_virtio_iommu::{
    device::{Binding, Device, DeviceConfig, Session},
    wire::Features,
};

use super::{
    Bench, Endpoints, Soft,
    model::{Completion, Effect, Mapping, Model, NOMEM, OK, Region, Setup, Space},
    range,
};

/// The endpoints of [`Endpoints`] that accesses are tried through.
pub(crate) const ENDPOINTS: [u32; 4] = [1, 2, 3, 8];

/// What a device is made with, but for its endpoints.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) options: DeviceConfig,
    pub(crate) limits: Limits,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape { options: DeviceConfig::default(), limits: Limits::NONE }
    }
}

impl Shape {
    fn setup(&self) -> Setup {
        let DeviceConfig { features, page_sizes, input_range, domain_range, .. } = &self.options;
        let region = |first, last, msi| Region { first, last, msi };
        let mut endpoints = BTreeMap::from([1, 2, 3].map(|id| (id, vec![])));
        endpoints.insert(8, vec![region(0, 0xffff, false), region(0xfee0_0000, 0xfeef_ffff, true)]);
        endpoints.insert(100, vec![region(0, 0xfff, true), region(0x1000, 0x1fff, true)]);
        endpoints.insert(101, vec![region(0, 0x1fff, false), region(0x1000, 0x2fff, false)]);
        Setup {
            offered: features.bits(),
            page_size_mask: page_sizes.bitmap(),
            input: (input_range.first().0, input_range.last().0),
            domains: *domain_range,
            probe_size: self.options.probe_size,
            bypass: self.options.bypass,
            max_domains: self.options.max_domains,
            max_mappings: self.limits.mappings,
            scarce: self.limits.table_bytes != u64::MAX,
            endpoints,
        }
    }
}

/// Both, with two request queues' sessions.
pub(crate) struct Twin {
    pub(crate) shape: Shape,
    pub(crate) endpoints: Arc<Endpoints>,
    pub(crate) device: Arc<Device<Endpoints>>,
    pub(crate) model: Model,
    sessions: [Session<Endpoints>; 2],
    pub(crate) met: Met,
}

/// What the requests of a program came to.
#[derive(Debug, Default)]
pub(crate) struct Met {
    /// How often each kind of request was completed with each status.
    pub(crate) completions: BTreeMap<(u8, u8), u64>,
    /// UNMAPs that removed several mappings.
    pub(crate) spanning: u64,
    /// The most mappings that were compared at a time.
    pub(crate) mappings: u64,
}

impl Twin {
    /// Both with all that is offered negotiated.
    pub(crate) fn new(shape: Shape) -> Twin {
        let mut model = Model::new(shape.setup());
        model.set_features(u64::MAX);
        let Bench { endpoints, device, .. } = Bench::with(shape.options.clone(), shape.limits);
        let sessions = [Session::new(), Session::new()];
        Twin { shape, endpoints, device, model, sessions, met: Met::default() }
    }

    pub(crate) fn negotiate(&mut self, bits: u64) {
        self.device.set_features(bits);
        self.model.set_features(bits);
    }

    pub(crate) fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.device.write_config(offset, data).expect("no invalidation fails here");
        self.model.write_config(offset, data);
    }

    /// Resets both, and starts the queues again, as the device requires.
    pub(crate) fn reset(&mut self, system: bool) {
        for session in &mut self.sessions {
            self.device.begin_sync(session);
            assert_eq!(self.device.poll_sync(session), Ok(true));
            *session = Session::new();
        }
        match system {
            true => self.device.system_reset(),
            false => self.device.reset(),
        }
        .expect("no invalidation fails here");
        match system {
            true => self.model.system_reset(),
            false => self.model.reset(),
        }
    }

    /// Makes both carry out a request and compares the replies; returns the status, if one was
    /// written. Without `sync` the invalidation is left to a later request of the queue's.
    pub(crate) fn request(
        &mut self,
        queue: usize,
        bytes: &[u8],
        room: usize,
        sync: bool,
    ) -> Option<u8> {
        let session = &mut self.sessions[queue];
        let mut reply = vec![0xee; room];
        let used = self.device.handle(session, bytes, &mut reply) as usize;
        if sync {
            self.device.begin_sync(session);
            // No reader is online, so that nothing is waited for.
            assert_eq!(self.device.poll_sync(session), Ok(true));
            assert!(!session.needs_sync());
        }
        self.compare_completion(bytes, used, &reply)
    }

    /// As [`request`](Self::request), for a reply that arrived by another way.
    pub(crate) fn compare_completion(
        &mut self,
        bytes: &[u8],
        used: usize,
        reply: &[u8],
    ) -> Option<u8> {
        let (completion, effect) = self.model.judge(bytes, reply.len());
        let untouched = |part: &[u8]| part.iter().all(|&byte| byte == 0xee);
        match completion {
            Completion::Unwritten => {
                assert_eq!(used, 0, "{bytes:02x?}: used, though it is not to be written");
                assert!(untouched(reply), "{bytes:02x?}: written {reply:02x?}");
                None
            }
            Completion::Properties(properties) => {
                assert_eq!((used, reply), (properties.len(), &properties[..]), "{bytes:02x?}");
                *self.met.completions.entry((bytes[0], OK)).or_default() += 1;
                Some(OK)
            }
            Completion::Tail { at, any_of } => {
                assert_eq!(used, at + 4, "{bytes:02x?}: used, and one of {any_of:?} is due");
                let status = reply[at];
                assert!(any_of.contains(&status), "{bytes:02x?}: {status} for one of {any_of:?}");
                assert_eq!(reply[at + 1..at + 4], [0; 3], "reserved bytes of the tail");
                assert!(untouched(&reply[..at]) && untouched(&reply[at + 4..]), "{reply:02x?}");
                *self.met.completions.entry((bytes[0], status)).or_default() += 1;
                if status == OK {
                    let before = self.model.count();
                    self.model.commit(effect);
                    let is_unmap = matches!(effect, Effect::Unmap { .. });
                    let gone = before.saturating_sub(self.model.count());
                    self.met.spanning += u64::from(is_unmap && gone > 1);
                    self.met.mappings = self.met.mappings.max(self.model.count());
                } else if status == NOMEM && any_of.contains(&OK) {
                    assert!(matches!(effect, Effect::Map { .. }));
                }
                Some(status)
            }
        }
    }

    /// The mappings of the domain that `endpoint` is attached to; `None` if it is to none with
    /// mappings.
    pub(crate) fn domain_of(&self, endpoint: u32) -> Option<Arc<Soft>> {
        match self.endpoints.bindings.lock().get(&endpoint) {
            Some(Binding::Domain(domain)) => Some(Arc::clone(domain)),
            _ => None,
        }
    }

    /// Compares all that both hold.
    pub(crate) fn compare(&self) {
        assert_eq!(self.device.config(), self.model.config(), "the configuration");
        assert_eq!(self.device.domains(), self.model.domains.len(), "domains");
        assert!(self.device.domains() <= self.shape.options.max_domains);
        let mut seen: BTreeMap<u32, Arc<Soft>> = BTreeMap::new();
        for endpoint in ENDPOINTS {
            let held = self.model.attached.get(&endpoint);
            let space = held.map(|domain| (*domain, &self.model.domains[domain]));
            let domain = self.domain_of(endpoint);
            let Some((id, Space::Mappings(mappings))) = space else {
                assert!(domain.is_none(), "endpoint {endpoint} is in a domain");
                continue;
            };
            let domain = domain.unwrap_or_else(|| panic!("endpoint {endpoint} is in no domain"));
            match seen.get(&id) {
                Some(other) => assert!(Arc::ptr_eq(other, &domain), "{id} is two domains"),
                None => {
                    assert!(seen.values().all(|other| !Arc::ptr_eq(other, &domain)));
                    let mappings: Vec<_> = mappings.values().copied().collect();
                    assert_eq!(all_mappings(&domain), mappings, "the mappings of domain {id}");
                    assert_eq!(domain.mappings(), mappings.len() as u64);
                    assert!(domain.mappings() <= self.shape.limits.mappings);
                    assert!(domain.table_bytes() <= self.shape.limits.table_bytes);
                    seen.insert(id, domain);
                }
            }
        }
    }

    /// Compares what a driver reads of the configuration.
    pub(crate) fn compare_config(&self, offset: usize, len: usize) {
        let mut out = vec![0xee; len];
        self.device.read_config(offset, &mut out);
        let config = self.model.config();
        let all = config.iter().copied().chain(std::iter::repeat(0));
        assert!(all.skip(offset.min(40)).take(len).eq(out), "{len} bytes at {offset}");
    }

    /// Compares where accesses of all endpoints at `addr` lead.
    pub(crate) fn compare_access(&self, addr: u64) {
        for endpoint in ENDPOINTS {
            for (access, write) in [(Prot::READ, false), (Prot::WRITE, true)] {
                assert_eq!(
                    self.endpoints.access(endpoint, addr, access),
                    self.model.access(endpoint, addr, write),
                    "endpoint {endpoint} at {addr:#x}, {access:?}"
                );
            }
        }
    }

    /// Compares accesses at both ends of whatever is mapped, and beside them.
    pub(crate) fn compare_accesses(&self) {
        for space in self.model.domains.values() {
            let Space::Mappings(mappings) = space else { continue };
            for held in mappings.values() {
                let ends = [held.first, held.last];
                let beside = [held.first.wrapping_sub(1), held.last.wrapping_add(1)];
                ends.into_iter().chain(beside).for_each(|addr| self.compare_access(addr));
            }
        }
        [0, u64::MAX, 0x1_0000, 0xfee0_0000].into_iter().for_each(|addr| self.compare_access(addr));
    }
}

/// The mappings of a domain as the model writes them.
pub(crate) fn all_mappings(domain: &Soft) -> Vec<Mapping> {
    let mut all = Vec::new();
    domain.for_each(|held| all.push(mapping(held)));
    all
}

/// A mapping as the model writes it.
pub(crate) fn mapping(held: ringfence_iommu::table::Mapping) -> Mapping {
    let (first, last) = (held.range.first().0, held.range.last().0);
    Mapping { first, last, phys: held.target, flags: held.prot.bits() }
}

/// A device of some granule, and limits, to be changed further.
pub(crate) fn shape(page_size_mask: u64, input: (u64, u64), offered: u64) -> Shape {
    let mut shape = Shape::default();
    shape.options.page_sizes = PageSizes::new(page_size_mask).expect("a page size");
    shape.options.input_range = range(input.0, input.1);
    shape.options.features = Features::from_bits_truncate(offered);
    shape
}
