//! A controller: started, identified, and stopped before its memory goes.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use ringfence_dma::{Device, Policy};
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use super::{
    Error, Identity, Namespace, Registers,
    admin::Admin,
    registers::{Capabilities, disable, enable, shut_down},
};

/// How a controller is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// How many I/O queues to request; 0 counts as 1. The controller may grant fewer. Default: 8.
    pub queues: u16,
    /// Time-out for commands in flight without any completion, and for the controller to become
    /// ready or to stop, even if it claims to need longer. Default: 30 s.
    pub limit: Duration,
}

impl Default for ControllerConfig {
    fn default() -> ControllerConfig {
        ControllerConfig { queues: 8, limit: Duration::from_secs(30) }
    }
}

/// A controller that runs, behind a device of the DMA API.
///
/// When it and its last queue are dropped, it is shut down in order, and stopped before
/// its memory is unmapped.
pub struct Controller<D: Domain + 'static, A: Allocator + 'static, R: Registers> {
    pub(super) inner: Arc<Inner<D, A, R>>,
}

/// What a controller and its queues share.
pub(super) struct Inner<D: Domain + 'static, A: Allocator + 'static, R: Registers> {
    pub(super) device: Device<D, A>,
    pub(super) config: ControllerConfig,
    pub(super) registers: Arc<R>,
    pub(super) capabilities: Capabilities,
    pub(super) state: Mutex<State<R>>,
    pub(super) identity: Identity,
    namespaces: Vec<Namespace>,
}

/// The part that changes.
pub(super) struct State<R> {
    /// `None` while the controller is stopped.
    pub(super) admin: Option<Admin<R>>,
    /// Which I/O queues are in use: index n is queue n+1. There are none before it is started.
    pub(super) queues: Vec<bool>,
}

impl<D: Domain, A: Allocator, R: Registers> fmt::Debug for Controller<D, A, R> {
    ringfence_sync::shows!(
        Controller as it, identity: it.inner.identity, namespaces: it.inner.namespaces
    );
}

impl<D: Domain<Target = HostAddr>, A: Allocator, R: Registers> Controller<D, A, R> {
    /// Resets the controller with these registers, which reaches memory through `device`, and
    /// starts it.
    ///
    /// # Errors
    /// It is gone, cannot be used, fails, or takes too long. It is stopped again in that case.
    pub fn start(
        device: Device<D, A>,
        registers: R,
        config: ControllerConfig,
    ) -> Result<Self, Error> {
        let registers = Arc::new(registers);
        let capabilities = Capabilities::read(&*registers)?;
        let state = Mutex::new(State { admin: None, queues: Vec::new() });
        let (identity, namespaces) = (Identity::default(), Vec::new());
        // If it is dropped from here on, the controller is stopped before its memory goes.
        let mut inner =
            Inner { device, config, registers, capabilities, state, identity, namespaces };
        inner.disable()?;
        let (entries, doorbells) = (capabilities.entries, inner.doorbells(0)?);
        let admin = Admin::new(&inner.device, &inner.registers, doorbells, entries, config.limit)?;
        let ready = inner.ready_timeout();
        let state = inner.state.get_mut();
        let admin = state.admin.insert(admin);
        enable(&*inner.registers, admin.pair.entries, admin.pair.places(), ready)?;
        inner.identity = admin.identity()?;
        let granted = admin.queues(config.queues)?;
        inner.namespaces = admin.namespaces()?;
        state.queues = vec![false; granted.into()];
        Ok(Controller { inner: Arc::new(inner) })
    }

    /// The controller's identity.
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// The usable namespaces: of the first 1024 active ones those of blocks without metadata.
    pub fn namespaces(&self) -> &[Namespace] {
        &self.inner.namespaces
    }

    /// The device through which it reaches memory.
    pub fn device(&self) -> &Device<D, A> {
        &self.inner.device
    }

    /// How many I/O queues there can be at a time.
    pub fn queues(&self) -> usize {
        self.inner.state.lock().queues.len()
    }

    /// The most commands that may be in flight in one queue.
    pub fn depth(&self) -> u32 {
        self.inner.capabilities.entries - 1
    }

    /// Shuts the controller down in order: its caches are written, and it has stopped. Commands in
    /// flight are lost, and queues fail with [`Error::Stopped`] from now on.
    ///
    /// # Errors
    /// It does not stop, or had failed before.
    pub fn shut_down(&self) -> Result<(), Error> {
        self.inner.end()
    }
}

impl<D: Domain, A: Allocator, R: Registers> Inner<D, A, R> {
    /// Time-out for the controller to become ready or to stop.
    fn ready_timeout(&self) -> Duration {
        self.capabilities.ready.min(self.config.limit)
    }

    fn disable(&self) -> Result<(), Error> {
        disable(&*self.registers, self.ready_timeout())
    }

    /// The doorbells of a queue.
    pub(super) fn doorbells(&self, queue: u16) -> Result<(u64, u64), Error> {
        self.capabilities.doorbells(&*self.registers, queue)
    }

    /// Stops the controller in any state: when this returns it uses no memory any more.
    ///
    /// # Errors
    /// It does not stop.
    pub(super) fn stop(&self) -> Result<(), Error> {
        let mut state = self.state.lock();
        let Some(admin) = &mut state.admin else { return Ok(()) };
        admin.fail(Error::Stopped);
        self.disable()?;
        state.admin = None;
        Ok(())
    }

    fn end(&self) -> Result<(), Error> {
        let shut_down = match &*self.state.lock() {
            State { admin: Some(_), queues } if !queues.is_empty() => {
                shut_down(&*self.registers, self.config.limit)
            }
            _ => Ok(()),
        };
        // Whether or not that succeeded.
        self.stop().and(shut_down)
    }

    /// Whether the device reaches only what is mapped, so that unmapped memory is safe from a
    /// controller that does not stop.
    pub(super) fn is_confined(&self) -> bool {
        self.device.effective_policy() != Policy::Off
    }

    /// Whether unmapped memory is reached until the next flush.
    pub(super) fn is_lazy(&self) -> bool {
        self.device.effective_policy().is_lazy()
    }
}

impl<D: Domain, A: Allocator, R: Registers> Drop for Inner<D, A, R> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!(%error, "an NVMe controller did not stop: it is given up");
        }
        // A controller that does not stop keeps its memory, if nothing else keeps it out.
        if !self.is_confined() {
            std::mem::forget(self.state.lock().admin.take());
        }
    }
}
