//! Any requests at all into a virtio-iommu device: no panic, no hang, no growth past the limits,
//! and what parses is emitted again as it was.
#![no_main]

use std::{collections::HashMap, sync::Mutex};

use libfuzzer_sys::fuzz_target;
use ringfence_iommu::{
    Geometry, GuestPhys, Iova, PageSizes, Range, ReservedKind, ReservedRegion, Result, SoftDomain,
    shootdown::Shootdown, table::Limits,
};
use ringfence_virtio_iommu::{
    device::{Backing, Binding, Device, EndpointInfo, Options, Session},
    wire::{FaultRecord, MAX_REQUEST_LEN, Properties, Request},
};
use std::sync::Arc;

const LIMITS: Limits = Limits { table_bytes: 1 << 20, mappings: 64 };

struct Endpoints {
    shootdown: Arc<Shootdown>,
    bindings: Mutex<HashMap<u32, Binding<SoftDomain<GuestPhys>>>>,
}

impl Backing for Endpoints {
    type Domain = SoftDomain<GuestPhys>;
    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        let range = Range::new(Iova(0xfee0_0000), Iova(0xfeef_ffff)).unwrap();
        let region = ReservedRegion { range, kind: ReservedKind::Msi };
        let reserved = if id == 3 { vec![region] } else { vec![] };
        (id < 4).then_some(EndpointInfo { reserved })
    }
    fn endpoints(&self) -> Vec<u32> {
        (0..4).collect()
    }
    fn create_domain(&self) -> Result<Arc<Self::Domain>> {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        Ok(SoftDomain::new(geometry, LIMITS, Arc::clone(&self.shootdown)))
    }
    fn set_domain(&self, endpoint: u32, to: Binding<Self::Domain>) -> Result<()> {
        self.bindings.lock().unwrap().insert(endpoint, to);
        Ok(())
    }
}

// Input: repeated [length of request, room for the reply, request].
fuzz_target!(|data: &[u8]| {
    let endpoints = Endpoints { shootdown: Shootdown::new(1), bindings: Mutex::default() };
    let options = Options { max_domains: 4, probe_size: 48, ..Options::default() };
    let features = options.features.bits();
    let device = Device::new(endpoints, options);
    device.set_features(features);
    let mut session = Session::new();
    let mut rest = data;
    while let [len, room, tail @ ..] = rest {
        let (request, after) = tail.split_at(tail.len().min(usize::from(*len) % 96));
        rest = after;
        let mut reply = vec![0xee; usize::from(*room)];
        let used = device.handle(&mut session, request, &mut reply) as usize;
        assert!(used <= reply.len());
        if used == 0 {
            assert!(reply.iter().all(|&byte| byte == 0xee));
        }
        device.begin_sync(&mut session);
        assert_eq!(device.poll_sync(&mut session), Ok(true));
        assert!(device.domains() <= 4);
        if let Ok(parsed) = Request::parse(request) {
            let mut bytes = [0; MAX_REQUEST_LEN];
            let len = parsed.emit(&mut bytes);
            assert_eq!(Request::parse(&bytes[..len]), Ok(parsed));
        }
        let _ = Properties::new(request).count();
        let _ = FaultRecord::parse(request);
    }
    for binding in device.backing().bindings.lock().unwrap().values() {
        if let Binding::Domain(domain) = binding {
            assert!(domain.mappings() <= LIMITS.mappings);
            assert!(domain.table_bytes() <= LIMITS.table_bytes);
        }
    }
    device.reset().unwrap();
    assert_eq!(device.domains(), 0);
});
