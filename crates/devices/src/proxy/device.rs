//! The proxy, as its front end sees it.

use std::{sync::Arc, time::Instant};

use ringfence_run::worker::Worker;
use ringfence_vhost_user::{BackendChannel, HandlerError, InflightRegion, Offer, Shutdown};
use ringfence_vhost_user_backend::{
    Addresses, Backend, Common, RawDevice, RingStart, requests::RequestRings,
};
use ringfence_virtq::{F_INDIRECT_DESC, F_VERSION_1};

use super::{
    Connector, ProxyOptions, ProxyQueue, ProxyUnit,
    back_end::BackEnd,
    connector::{Order, REPLIES_WITHIN},
};

/// The proxy of one back end, for one connection of a front end.
pub struct Proxy {
    options: ProxyOptions,
    rings: RequestRings<ProxyQueue>,
    back: BackEnd,
    connector: Arc<Connector>,
}

impl Proxy {
    /// Connects to the back end, and makes the proxy a back end itself, whose queues are spread over
    /// `workers` in turn.
    ///
    /// # Errors
    /// The back end is not there, or no proxy can stand before it.
    ///
    /// # Panics
    /// If there is no worker.
    pub fn connect(
        options: ProxyOptions,
        connector: &Arc<Connector>,
        workers: Arc<[Worker]>,
    ) -> Result<Backend<Proxy>, HandlerError> {
        let connected = connector.connect()?;
        let ProxyOptions { queues, pool_size, .. } = options;
        let (back, watched) = BackEnd::new(&options.name, connected, queues, pool_size)?;
        connector.order(Order::Watch(watched));
        connector.counts(back.ram());
        let addresses = options.iotlb.map_or(Addresses::Physical, Addresses::Iotlb);
        let (name, figures) = (Arc::clone(&options.name), Arc::clone(&options.figures));
        let rings = RequestRings::new(name, workers, options.unit, figures);
        let device = Proxy { options, rings, back, connector: Arc::clone(connector) };
        Ok(Backend::new(device, addresses))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.connector.order(Order::Forget);
    }
}

impl RawDevice for Proxy {
    type Rings = ProxyUnit;

    fn connected(&mut self, connection: &Shutdown) {
        self.connector.order(Order::Ends(connection.clone()));
    }

    fn common(&self) -> Common<'_, ProxyUnit> {
        self.rings.common()
    }

    fn offer(&self) -> Offer {
        self.back.offer()
    }

    /// A table may have more buffers than a ring that takes no tables.
    fn withheld(&self) -> u64 {
        F_INDIRECT_DESC & !self.back.offered
    }

    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        if features & F_VERSION_1 == 0 {
            return Err(HandlerError::new("VIRTIO_F_VERSION_1 is needed"));
        }
        Ok(self.back.set_features(features)?)
    }

    fn reset(&mut self) {
        self.rings.set_inflight(None);
        if let Err(why) = self.back.reset() {
            tracing::warn!(source = %self.options.name, "{why}");
        }
    }

    fn start(&mut self, ring: u16, start: RingStart) -> Result<(), HandlerError> {
        let (enabled, copy_back) = (start.enabled, self.options.copy_back);
        let (back, mut runs) = (&mut self.back, false);
        let started = self.rings.start(ring, start, |size| {
            let shadow = back.start(ring, size)?;
            runs = true;
            back.enable(ring, enabled)?;
            Ok(ProxyQueue::new(shadow, back.indirect(), copy_back))
        });
        if started.is_err() && runs {
            // The first error says what is wrong.
            let _ = self.back.stop(ring);
        }
        started
    }

    /// The back end stops first: what it has completed by then is completed, and the rest put back.
    fn stop(&mut self, ring: u16, connection: Option<&Shutdown>) -> Result<u32, HandlerError> {
        let begun = Instant::now();
        // A front end that is gone waits for no reply, and the next one may be there.
        if !connection.is_some_and(Shutdown::is_over) {
            self.back.stop(ring)?;
        }
        self.rings.shares().on(ring.into(), move |unit| {
            unit.serve(ring).into_iter().for_each(ProxyQueue::stop);
        })?;
        self.rings.stop(ring, || {
            let over = self.rings.is_given_up(connection);
            over.unwrap_or_else(|| begun.elapsed() >= REPLIES_WITHIN)
        })
    }

    fn enable(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.back.enable(ring, enabled)?;
        if enabled {
            // A back end may have lost a kick while the ring was not enabled.
            self.rings.shares().on(ring.into(), move |unit| {
                unit.serve(ring).into_iter().for_each(|queue| queue.kick.notify());
            })?;
        }
        Ok(())
    }

    fn set_channel(&mut self, channel: &Arc<BackendChannel>) {
        self.connector.order(Order::PassOn(Arc::clone(channel)));
    }

    fn forget(&mut self) {
        self.rings.forget();
    }

    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        Ok(self.back.config(offset, out)?)
    }

    fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<(), HandlerError> {
        Ok(self.back.set_config(offset, data)?)
    }

    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        self.rings.set_inflight(Some(inflight));
        Ok(())
    }

    fn send_rarp(&mut self, mac: [u8; 6], _: u64) -> Result<(), HandlerError> {
        Ok(self.back.send_rarp(mac)?)
    }
}
