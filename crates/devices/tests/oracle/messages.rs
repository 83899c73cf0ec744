//! The probes as a vhost-user device: a front end and a back end of the product, and the messages of a device
//! IOTLB between them.

use std::{
    os::fd::AsFd,
    sync::{Arc, mpsc},
};

use ringfence_iotlb::{Endpoint, IotlbConfig};
use ringfence_mem::{DirtyLog, GuestRam, Memory};
use ringfence_run::{event, worker::Worker};
use ringfence_vhost_user::{
    Frontend, FrontendChannel, HandlerError, Offer, ProtocolFeatures, RingAddresses, Shutdown,
};
use ringfence_vhost_user_backend::{
    Addresses, Backend, Change, Common, IotlbTally, RawDevice, RingStart, Rings, Shares,
};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_VERSION_1};

use crate::{
    lying::Lie,
    probe::{Probe, ProbeUnit},
    rig::LONG,
    serving::Serving,
};

/// A device whose ring on each worker is a probe.
struct Probes {
    workers: Arc<[Worker]>,
    shares: Shares<ProbeUnit>,
    tally: IotlbTally,
    lie: Lie,
    started: mpsc::Sender<(Probe, Arc<Endpoint>)>,
}

impl RawDevice for Probes {
    type Rings = ProbeUnit;

    fn common(&self) -> Common<'_, ProbeUnit> {
        Common { name: "probes", shares: &self.shares, part: (), tally: &self.tally, bells: None }
    }

    fn offer(&self) -> Offer {
        Offer { max_ring_size: 8, ..Offer::new(0, self.workers.len() as u16) }
    }

    fn start(&mut self, ring: u16, on: RingStart) -> Result<(), HandlerError> {
        let endpoint = on.endpoint.expect("addresses are translated");
        let worker = &self.workers[usize::from(ring)];
        let probe = Probe::start(worker, self.shares.unit(), &endpoint, &on.memory, self.lie);
        self.started.send((probe, endpoint)).expect("the rig waits for it");
        Ok(())
    }

    fn stop(&mut self, _: u16, _: Option<&Shutdown>) -> Result<u32, HandlerError> {
        Ok(0)
    }

    fn forget(&mut self) {
        let unit = self.shares.unit();
        for share in 0..self.shares.count() {
            // A worker that is gone has nothing any more.
            let _ = self.shares.on_worker(share, move |work| drop(work.remove(unit)));
        }
    }

    fn config(&mut self, _: u32, _: &mut [u8]) -> Result<(), HandlerError> {
        Err(HandlerError::new("there is no configuration space"))
    }
}

impl Rings for ProbeUnit {
    type Part = ();

    fn change(&mut self, _: (), _: u16, _: Change) {}
    fn set_memory(&mut self, _: (), _: &Arc<Memory>) {}
    fn set_log(&mut self, _: (), _: Option<&Arc<DirtyLog>>) {}

    fn relocate(&mut self, _: (), _: u16, _: RingAddresses) -> Result<(), HandlerError> {
        Ok(())
    }
}

/// A connection to the probes.
pub(crate) struct Served {
    pub(crate) frontend: Frontend,
    pub(crate) misses: FrontendChannel,
    pub(crate) serving: Serving,
    pub(crate) probes: Vec<Probe>,
    /// What the probes' addresses go through.
    pub(crate) endpoint: Arc<Endpoint>,
}

/// Starts a probe on each worker, as its unit `unit`.
pub(crate) fn connect(
    workers: &Arc<[Worker]>,
    unit: u32,
    config: IotlbConfig,
    ram: &GuestRam,
    lie: Lie,
) -> Served {
    let (started, probes) = mpsc::channel();
    let (workers, shares) = (Arc::clone(workers), Shares::new(Arc::clone(workers), unit));
    let count = workers.len() as u16;
    let device = Probes { workers, shares, tally: IotlbTally::default(), lie, started };
    let (serving, socket) = Serving::start(Backend::new(device, Addresses::Iotlb(config)));
    let mut frontend = Frontend::new(socket, LONG);
    let features = F_VERSION_1 | F_ACCESS_PLATFORM;
    let protocol =
        ProtocolFeatures::MQ | ProtocolFeatures::REPLY_ACK | ProtocolFeatures::BACKEND_REQ;
    assert_eq!(frontend.negotiate(features, protocol).unwrap(), features);
    let (misses, theirs) = FrontendChannel::pair(LONG).unwrap();
    frontend.set_backend_channel(theirs.as_fd()).unwrap();
    frontend.set_mem_table(&[(ram.region(), ram.fd())]).unwrap();
    let kick = event::new().unwrap();
    for ring in 0..count {
        // No probe looks at its ring.
        let addresses = RingAddresses { desc: 0, avail: 0, used: 0, log: None };
        frontend.set_vring_num(ring, 8).unwrap();
        frontend.set_vring_base(ring, 0).unwrap();
        frontend.set_vring_addr(ring, &addresses).unwrap();
        frontend.set_vring_kick(ring, Some(kick.as_fd())).unwrap();
        frontend.set_vring_enable(ring, true).unwrap();
    }
    let (probes, endpoints): (Vec<_>, Vec<_>) = probes.iter().take(count.into()).unzip();
    let endpoint = endpoints.into_iter().next().expect("there are workers");
    Served { frontend, misses, serving, probes, endpoint }
}
