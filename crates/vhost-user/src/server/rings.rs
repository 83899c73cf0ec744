//! The state of the rings, the memory, the log and the IOTLB.

use std::sync::{Arc, atomic::Ordering};

use ringfence_mem::{DirtyLog, Memory, SharedFile};
use ringfence_run::PeerFd;

use super::{Failure, Ring, Server};
use crate::{
    Handler, HandlerError, Iotlb, RingAddresses, RingSetup, WireError,
    iotlb::IotlbWire,
    msg::{self, Inflight, code},
};

impl<H: Handler> Server<H> {
    pub(super) fn ring(&self, request: u32, ring: u32) -> Result<usize, WireError> {
        let index = ring as usize;
        if index < self.rings.len() {
            return Ok(index);
        }
        Err(WireError::Value { request, field: "ring", value: ring.into() })
    }

    pub(super) fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.handler.set_memory(Arc::clone(&memory))?;
        self.memory = Some(memory);
        self.note_mapped();
        Ok(())
    }

    pub(super) fn start(
        &mut self,
        request: u32,
        ring: usize,
        kick: Option<PeerFd>,
    ) -> Result<(), Failure> {
        let missing = |why| Failure::Wire(WireError::State { request, why });
        let Ring { size, addresses, enabled, .. } = self.rings[ring];
        let size = size.ok_or_else(|| missing("the ring has no size yet"))?;
        let addresses = addresses.ok_or_else(|| missing("the ring has no addresses yet"))?;
        if self.memory.is_none() {
            return Err(missing("there is no memory yet"));
        }
        self.suits(request, size, self.rings[ring].base)?;
        // A new kick for a running ring: it goes on where it is.
        self.stop(ring)?;
        let Ring { base, lost, .. } = self.rings[ring];
        let base = (!lost).then_some(base);
        let resumed = self.resuming;
        let setup = RingSetup { size, addresses, base, kick, enabled, resumed };
        // The device may ask for the ring's translations at once.
        self.speak(true);
        let started = self.handler.start_ring(ring as u16, setup);
        self.rings[ring].running = started.is_ok();
        self.speak(false);
        Ok(started?)
    }

    /// Cross-checks what several messages, which may have come in any order, have set for a ring:
    /// the size and the base were valid given what was known when each of them came.
    fn suits(&self, request: u32, size: u16, base: u32) -> Result<(), WireError> {
        let value = |field, value| Err(WireError::Value { request, field, value });
        if !self.is_packed() {
            if !size.is_power_of_two() {
                return value("the size of a split ring", size.into());
            }
            if base > u16::MAX.into() {
                return value("the base of a split ring", base.into());
            }
        } else if [base, base >> 16].into_iter().any(|place| place & 0x7fff >= size.into()) {
            // The ring checks how far its places may be from each other.
            return value("a base with a place beyond the packed ring", base.into());
        }
        Ok(())
    }

    /// Stops a ring, if it runs, and records its position. A device that fails to stop it is not
    /// asked again: another request that needs the ring stopped would then succeed.
    pub(super) fn stop(&mut self, ring: usize) -> Result<(), Failure> {
        if self.rings[ring].running {
            self.rings[ring].running = false;
            let base = self.handler.stop_ring(ring as u16);
            self.speak(false);
            if !self.rings.iter().any(|ring| ring.running) {
                self.handler.suspended();
            }
            self.rings[ring].base = base.map_err(Failure::Broken)?;
            self.rings[ring].lost = false;
        }
        Ok(())
    }

    pub(super) fn enable(&mut self, ring: usize, enabled: bool) -> Result<(), HandlerError> {
        if self.rings[ring].running && self.rings[ring].enabled != enabled {
            self.handler.enable_ring(ring as u16, enabled)?;
        }
        self.rings[ring].enabled = enabled;
        Ok(())
    }

    pub(super) fn reset(&mut self) -> Result<(), Failure> {
        for ring in 0..self.rings.len() {
            self.stop(ring)?;
            self.rings[ring] = Ring::default();
        }
        if self.features & msg::F_LOG_ALL != 0 {
            self.handler.set_log(None)?;
        }
        self.features = 0;
        self.status = 0;
        Ok(self.handler.reset()?)
    }

    /// Reads an IOTLB message, and checks it against the memory (rule D14).
    pub(super) fn read_iotlb(&self, message: &IotlbWire) -> Result<Iotlb, HandlerError> {
        let message = message.parse()?;
        match message {
            Iotlb::Update { first, last, user_addr, .. } => {
                let memory = self.memory.as_ref().ok_or_else(|| HandlerError::new("no memory"))?;
                if !msg::within(memory.regions(), user_addr, user_addr + (last - first)) {
                    return Err(HandlerError::new("an update outside of memory"));
                }
            }
            Iotlb::Invalidate { .. } => {}
            Iotlb::Miss { .. } | Iotlb::AccessFail { .. } => {
                return Err(HandlerError::new("a message that only a back end sends"));
            }
        }
        Ok(message)
    }

    /// SET_VRING_ADDR for a running ring: a front end that begins to log sends the addresses again.
    pub(super) fn move_ring(
        &mut self,
        ring: usize,
        addresses: RingAddresses,
    ) -> Result<(), HandlerError> {
        let before = self.rings[ring].addresses.unwrap_or_default();
        if (RingAddresses { log: addresses.log, ..before }) != addresses {
            return self.handler.move_ring(ring as u16, addresses);
        }
        if before.log != addresses.log {
            return self.handler.log_ring(ring as u16, addresses.log);
        }
        Ok(())
    }

    /// SET_FEATURES. Only F_LOG_ALL may change while a ring runs; it holds once there is a log.
    pub(super) fn set_features(&mut self, features: u64) -> Result<(), Failure> {
        let request = code::SET_FEATURES;
        let value = features & !self.offered;
        if value != 0 {
            let field = "features beyond those offered";
            return Err(WireError::Value { request, field, value }.into());
        }
        let running = self.rings.iter().any(|ring| ring.running);
        if (features ^ self.features) & !msg::F_LOG_ALL != 0 && running {
            let why = "features change while a ring runs";
            return Err(WireError::State { request, why }.into());
        }
        let logs = features & msg::F_LOG_ALL != 0;
        if !running {
            self.handler.set_features(features & !super::OWN_FEATURES)?;
        }
        if logs != (self.features & msg::F_LOG_ALL != 0) {
            self.handler.set_log(self.log.clone().filter(|_| logs))?;
        }
        self.features = features;
        if features & msg::F_PROTOCOL_FEATURES == 0 {
            for ring in 0..self.rings.len() {
                self.enable(ring, true)?;
            }
        }
        Ok(())
    }

    /// SET_LOG_BASE: writes are logged there from now on, if logging is on.
    pub(super) fn set_log(&mut self, file: SharedFile) -> Result<(), HandlerError> {
        let log = Arc::new(DirtyLog::new(file));
        if self.features & msg::F_LOG_ALL != 0 {
            self.handler.set_log(Some(Arc::clone(&log)))?;
        }
        self.log = Some(log);
        self.note_mapped();
        Ok(())
    }

    fn note_mapped(&self) {
        let mapped = super::requests::bytes(self.regions(), self.log_bytes());
        self.mapped.store(mapped, Ordering::Relaxed);
    }

    /// Checks the number and the size of the queues that an in-flight region is for.
    pub(super) fn inflight_shape(
        &self,
        request: u32,
        place: &Inflight,
    ) -> Result<Inflight, WireError> {
        let value = |field, value: u16| WireError::Value { request, field, value: value.into() };
        if place.queues == 0 || usize::from(place.queues) > self.rings.len() {
            return Err(value("queues", place.queues));
        }
        if place.size == 0 || place.size > self.handler.max_ring_size() {
            return Err(value("queue size", place.size));
        }
        Ok(*place)
    }

    pub(super) fn is_packed(&self) -> bool {
        self.features & msg::F_RING_PACKED != 0
    }

    /// Sets whether the device may send messages of its own: while a ring runs, or is about to
    /// (rule D27).
    fn speak(&self, now: bool) {
        if let Some(backend) = &self.backend {
            backend.channel().set_silent(!now && !self.rings.iter().any(|ring| ring.running));
        }
    }
}
