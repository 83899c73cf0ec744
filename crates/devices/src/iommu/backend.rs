//! virtio-iommu as a vhost-user back end.

use std::sync::Arc;

use ringfence_mem::Memory;
use ringfence_run::PeerFd;
use ringfence_vhost_user::{
    ConfigWrite, Handler, HandlerError, Offer, ProtocolFeatures, RingSetup, msg::code,
};
use ringfence_vhost_user_backend::{Events, FrontEnd, RingStart, of_ring};
use ringfence_virtio_iommu::device::Completions;
use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1};

use super::{
    Iommu, IommuClient,
    device::FrontUnit,
    reach::Shared,
    unit::{Call, REQUESTS},
};

/// A virtio-iommu as a vhost-user back end, for one front end.
pub struct IommuBackend {
    client: IommuClient,
    front: FrontEnd,
    /// Where interrupts go: front ends set this before they bring memory.
    calls: [Option<Call>; 2],
}

impl Iommu {
    /// A back end for a front end; the one before it must be gone.
    pub fn connect(self: &Arc<Self>) -> IommuBackend {
        if let Err(error) = self.device.backing().open() {
            tracing::error!(source = %"iommu", "an endpoint stays blocked: {error}");
        }
        IommuBackend { client: self.client(), front: FrontEnd::default(), calls: [None, None] }
    }
}

impl IommuBackend {
    /// The IOMMU that it serves.
    pub fn iommu(&self) -> &Arc<Iommu> {
        &self.client.iommu
    }
}

/// The front end is gone. What is behind the IOMMU reaches nothing from now on.
impl Drop for IommuBackend {
    fn drop(&mut self) {
        self.iommu().front_end_gone(self.client.number);
    }
}

impl Handler for IommuBackend {
    fn offer(&self) -> Offer {
        use ProtocolFeatures as P;
        let features = self.iommu().device.features().bits() | F_VERSION_1 | F_EVENT_IDX;
        let protocol = P::REPLY_ACK | P::MQ | P::CONFIG | P::RESET_DEVICE;
        Offer { protocol, max_ring_size: 1024, ..Offer::new(features, 2) }
    }

    fn can_be_resumed(&self) -> bool {
        self.iommu().device.has_journal()
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        if features & F_VERSION_1 == 0 {
            return Err(HandlerError::new("VIRTIO_F_VERSION_1 is needed"));
        }
        self.iommu().device.set_features(features);
        self.front.set_features(features);
        Ok(())
    }

    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.client.set_memory(&memory)?;
        self.front.set_memory("iommu", &memory);
        let iommu = self.iommu();
        let (device, reported) = (Arc::clone(&iommu.device), Arc::clone(&iommu.reported));
        let (calls, reach) = (self.calls.clone(), Shared::new(&memory));
        let number = iommu.shares.unit();
        iommu.shares.on_worker(0, move |work| match work.unit::<FrontUnit>(number) {
            Some(unit) => unit.set_reach(reach),
            None => {
                let mut unit = FrontUnit::new(device, reported, reach);
                (0..).zip(calls).for_each(|(ring, call)| unit.set_call(ring, call));
                work.insert(number, Box::new(unit));
            }
        })
    }

    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        let RingStart { config, events: Events { kick, .. }, enabled, at_used, .. } =
            self.front.start(ring, setup)?;
        let completed = match ring {
            REQUESTS => self.iommu().requests_start(config.base, at_used, self.front.features())?,
            _ => Completions::default(),
        };
        let started = self
            .iommu()
            .shares
            .on(0, move |unit| unit.start(ring, config, at_used, completed, kick, enabled))?;
        Ok(started.ok_or_else(|| HandlerError::new("there is no memory yet"))??)
    }

    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        let iommu = self.iommu();
        let (next, _) = FrontUnit::stop_on(&iommu.shares, ring)?
            .ok_or_else(|| HandlerError::new("the ring is not running"))?;
        if ring == REQUESTS {
            iommu.requests_stopped(next);
        }
        Ok(next)
    }

    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.iommu().shares.on(0, move |unit| unit.enable(ring, enabled))?;
        Ok(())
    }

    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError> {
        let call = of_ring(ring, call)?;
        let call = call.map(|call| Arc::new(move || call.notify()) as Call);
        if let Some(kept) = self.calls.get_mut(usize::from(ring)) {
            kept.clone_from(&call);
        }
        let set = call.clone();
        self.iommu().shares.on(0, move |unit| unit.set_call(ring, set))?;
        // What was given back before may not have been signalled.
        call.iter().for_each(|call| call());
        Ok(())
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        self.iommu().device.read_config(offset as usize, out);
        Ok(())
    }

    fn set_config(&mut self, offset: u32, _: ConfigWrite, data: &[u8]) -> Result<(), HandlerError> {
        Ok(self.iommu().device.write_config(offset as usize, data)?)
    }

    fn leaves(&mut self) {
        self.iommu().hand_over();
    }

    fn reset(&mut self) -> Result<(), HandlerError> {
        self.front.set_features(0);
        self.iommu().front_end_resets()
    }

    fn refused(&mut self, request: u32, why: &HandlerError) {
        tracing::warn!(source = %"iommu", "{} was refused: {why}", code::name(request));
    }
}
