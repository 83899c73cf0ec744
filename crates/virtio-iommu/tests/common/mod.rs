//! A device over software domains, for the tests of both ends.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub(crate) mod model;
pub(crate) mod pieces;
pub(crate) mod program;
pub(crate) mod ring;
pub(crate) mod twin;

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use ringfence_iommu::{
    Domain, Error, Geometry, GuestPhys, Iova, Map, PageSizes, Prot, Range, ReservedKind,
    ReservedRegion, Result, SoftDomain, SyncToken, shootdown::Shootdown, table::Limits,
};
use ringfence_virtio_iommu::{
    device::{Backing, Binding, Device, DeviceConfig, EndpointInfo, Session},
    wire::{
        AttachFlags, Features, IommuConfig, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, Status,
        TAIL_LEN, UnmapRequest, parse_tail,
    },
};

pub(crate) type Soft = SoftDomain<GuestPhys>;

/// Endpoints 1, 2 and 3 without, endpoint 8 with reserved regions.
pub(crate) struct Endpoints {
    pub(crate) shootdown: Arc<Shootdown>,
    pub(crate) bindings: Mutex<HashMap<u32, Binding<Arc<Soft>>>>,
    pub(crate) geometry: Geometry,
    pub(crate) limits: Limits,
    /// Why endpoints can go nowhere but where they are blocked.
    pub(crate) refusal: Mutex<Option<Error>>,
    /// Endpoints that have gone.
    pub(crate) gone: Mutex<Vec<u32>>,
}

pub(crate) const RESERVED: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

impl Endpoints {
    pub(crate) fn new(page_sizes: PageSizes, limits: Limits) -> Arc<Endpoints> {
        let bindings = [1, 2, 3, 8].map(|id| (id, Binding::Blocked)).into();
        Arc::new(Endpoints {
            shootdown: Shootdown::new(4),
            bindings: Mutex::new(bindings),
            geometry: Geometry::new(page_sizes, Range::ALL),
            limits,
            refusal: Mutex::default(),
            gone: Mutex::default(),
        })
    }

    /// Where an access of `endpoint` at `iova` leads.
    pub(crate) fn access(&self, endpoint: u32, iova: u64, access: Prot) -> Option<u64> {
        match self.bindings.lock().get(&endpoint)? {
            Binding::Blocked => None,
            Binding::Bypass => Some(iova),
            Binding::Domain(domain) => {
                let reader = self.shootdown.reader().expect("a free reader");
                let found = domain.translate(&reader, Iova(iova))?;
                found.prot.allows(access).then(|| iova.wrapping_add(found.delta))
            }
        }
    }
}

impl Backing for Endpoints {
    type Domain = Soft;

    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        let reserved = match id {
            id if self.gone.lock().contains(&id) => return None,
            1..=3 => vec![],
            8 => vec![
                ReservedRegion { range: range(0, 0xffff), kind: ReservedKind::Reserved },
                ReservedRegion { range: range(RESERVED.0, RESERVED.1), kind: ReservedKind::Msi },
            ],
            // Two endpoints that a device must not have.
            100 => [(0, 0xfff), (0x1000, 0x1fff)]
                .map(|(a, b)| ReservedRegion { range: range(a, b), kind: ReservedKind::Msi })
                .into(),
            101 => [(0, 0x1fff), (0x1000, 0x2fff)]
                .map(|(a, b)| ReservedRegion { range: range(a, b), kind: ReservedKind::Reserved })
                .into(),
            _ => return None,
        };
        Some(EndpointInfo { reserved })
    }
    fn endpoints(&self) -> Vec<u32> {
        vec![1, 2, 3, 8]
    }
    fn create_domain(&self) -> Result<Arc<Soft>> {
        Ok(SoftDomain::new(self.geometry.clone(), self.limits, Arc::clone(&self.shootdown)))
    }
    fn set_domain(&self, endpoint: u32, to: Binding<Arc<Soft>>) -> Result<()> {
        if let Some(error) = *self.refusal.lock()
            && !matches!(to, Binding::Blocked)
        {
            return Err(error);
        }
        self.bindings.lock().insert(endpoint, to);
        Ok(())
    }
    fn sync_binding_begin(&self, _endpoint: u32) -> Result<SyncToken> {
        Ok(SyncToken::new(self.shootdown.begin(&[Range::ALL])))
    }
    fn sync_binding_poll(&self, token: SyncToken) -> Result<bool> {
        Ok(self.shootdown.is_over(token.as_u64()))
    }
}

pub(crate) fn range(first: u64, last: u64) -> Range {
    Range::new(Iova(first), Iova(last)).expect("a range")
}

/// A device with all features negotiated, and what is needed to send it requests by hand.
pub(crate) struct Bench {
    pub(crate) endpoints: Arc<Endpoints>,
    pub(crate) device: Arc<Device<Endpoints>>,
    pub(crate) session: Session<Endpoints>,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::with(DeviceConfig::default(), Limits::NONE)
    }

    pub(crate) fn with(options: DeviceConfig, limits: Limits) -> Bench {
        let endpoints = Endpoints::new(options.page_sizes, limits);
        let features = options.features.bits();
        let device = Device::new(Arc::clone(&endpoints), options);
        device.set_features(features);
        Bench { endpoints, device: Arc::new(device), session: Session::new() }
    }

    pub(crate) fn config(&self) -> IommuConfig {
        IommuConfig::parse(&self.device.config()).expect("a legal configuration")
    }

    /// Sends bytes; the used length and what was written.
    pub(crate) fn raw(&mut self, request: &[u8], room: usize) -> (usize, Vec<u8>) {
        let mut reply = vec![0xee; room];
        let used = self.device.handle(&mut self.session, request, &mut reply);
        self.device.begin_sync(&mut self.session);
        assert_eq!(self.device.poll_sync(&mut self.session), Ok(true));
        (used as usize, reply)
    }

    /// Sends a request, after `change` to its bytes.
    pub(crate) fn changed(&mut self, request: Request, change: impl FnOnce(&mut [u8])) -> Status {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        change(&mut bytes[..len]);
        let (used, reply) = self.raw(&bytes[..len], TAIL_LEN);
        assert_eq!(used, TAIL_LEN);
        assert_eq!(reply[1..], [0; 3], "reserved bytes of the tail");
        parse_tail([reply[0], 0, 0, 0]).expect("a status")
    }

    pub(crate) fn send(&mut self, request: Request) -> Status {
        self.changed(request, |_| {})
    }

    pub(crate) fn attach(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Attach { domain, endpoint, flags: AttachFlags::empty() })
    }

    pub(crate) fn attach_bypass(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Attach { domain, endpoint, flags: AttachFlags::BYPASS })
    }

    pub(crate) fn detach(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Detach { domain, endpoint })
    }

    pub(crate) fn map(&mut self, domain: u32, range: Range, phys: u64) -> Status {
        let flags = MapFlags::READ | MapFlags::WRITE;
        self.send(Request::Map(MapRequest { domain, range, phys, flags }))
    }

    pub(crate) fn unmap(&mut self, domain: u32, range: Range) -> Status {
        self.send(Request::Unmap(UnmapRequest { domain, range }))
    }

    pub(crate) fn reads(&self, endpoint: u32, iova: u64) -> Option<u64> {
        self.endpoints.access(endpoint, iova, Prot::READ)
    }
}

/// How a domain of a test refuses.
pub(crate) fn refused<T>(result: Result<T>) -> Option<u8> {
    match result {
        Err(Error::Device { status, .. }) => Some(status),
        _ => None,
    }
}

pub(crate) fn all_features() -> Features {
    DeviceConfig::default().features
}

/// Maps without the sync, for what is expected to be in order.
pub(crate) fn map(domain: &impl Domain<Target = GuestPhys>, range: Range, phys: u64) -> Result<()> {
    domain.map(Map::new(range, GuestPhys(phys), Prot::RW))
}
