//! The suite of what any domain owes, of a virtio-iommu's: the driver in one thread, the device in a second,
//! and what translates for the endpoint in a third.
#![cfg(not(loom))]

mod common;

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread,
};

use common::{Bench, ring::Served};
use ringfence_iommu::{GuestPhys, Iova, Map, Prot, Range, table::Limits};
use ringfence_iommu_testing::suite::{Cache, Subject, pass};
use ringfence_virtio_iommu::{
    device::{Binding, DeviceConfig},
    driver::{DriverConfig, Notify, ViommuDomain},
    wire::Features,
};

struct Rig {
    domain: Arc<ViommuDomain>,
    access: Sender<(Iova, Prot)>,
    replies: Receiver<Option<u64>>,
    _served: Served,
}

impl Rig {
    fn new(features: Features, size: u16, notify: Notify) -> Rig {
        let options = DeviceConfig { features, ..DeviceConfig::default() };
        let bench = Bench::with(options, Limits::NONE);
        let options = DriverConfig { notify, ..DriverConfig::default() };
        let served = Served::start(bench, size, options, false);
        let domain = match features.contains(Features::LAZY_IOTLB_FLUSH) {
            true => served.driver.lazy_domain().unwrap(),
            false => served.driver.domain().unwrap(),
        };
        domain.attach(1).unwrap();
        let Binding::Domain(behind) = served.endpoints.bindings.lock()[&1].clone() else {
            panic!("the endpoint is elsewhere")
        };
        let mut cache = Cache::new(served.endpoints.shootdown.reader().unwrap());
        let (access, accesses) = mpsc::channel();
        let (reply, replies) = mpsc::channel();
        thread::spawn(move || {
            loop {
                match accesses.try_recv() {
                    Ok((iova, prot)) => reply.send(cache.access(&behind, iova, prot)).unwrap(),
                    Err(TryRecvError::Empty) => {
                        cache.quiet();
                        thread::yield_now();
                    }
                    Err(TryRecvError::Disconnected) => break,
                }
            }
        });
        Rig { domain, access, replies, _served: served }
    }
}

impl Subject for Rig {
    type Domain = ViommuDomain;
    fn domain(&self) -> &ViommuDomain {
        &self.domain
    }
    fn map(&self, range: Range, to: u64, prot: Prot) -> Map<GuestPhys> {
        Map::new(range, GuestPhys(0x40_0000 + (to << 12)), prot)
    }
    fn access(&mut self, iova: Iova, prot: Prot) -> Option<u64> {
        self.access.send((iova, prot)).unwrap();
        self.replies.recv().unwrap()
    }
}

fn passes(mut rig: Rig) {
    let left = ["reports_a_sync_that_failed", "lists_what_is_mapped"];
    assert_eq!(pass(&mut rig).as_deref(), Ok(&left[..]));
}

#[test]
fn a_domain_of_a_virtio_iommu_keeps_it_over_rings_of_any_size() {
    for (size, notify) in [(4, Notify::Sleep), (16, Notify::Adaptive), (256, Notify::Poll)] {
        passes(Rig::new(DeviceConfig::default().features, size, notify));
    }
}

#[test]
fn a_lazy_domain_keeps_it() {
    let features = DeviceConfig::default().features | Features::LAZY_IOTLB_FLUSH;
    passes(Rig::new(features, 64, Notify::Sleep));
}
