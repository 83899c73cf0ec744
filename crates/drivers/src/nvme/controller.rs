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
    /// How many I/O queues to request. The controller may grant fewer. Default: 8.
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

/// A controller that runs, behind a device of the DMA API. A clone is the same controller.
///
/// When the last clone and the last queue are dropped, it is shut down in order, and stopped before
/// its memory is unmapped.
pub struct Controller<D: Domain + 'static, A: Allocator + 'static, R: Registers> {
    pub(super) inner: Arc<Inner<D, A, R>>,
}

/// What a controller and its queues share.
pub(super) struct Inner<D: Domain + 'static, A: Allocator + 'static, R: Registers> {
    pub(super) device: Device<D, A>,
    pub(super) config: ControllerConfig,
    pub(super) state: Mutex<State<R>>,
    identity: Identity,
    namespaces: Vec<Namespace>,
    pub(super) core: Core<R>,
}

/// What is needed to operate a controller.
pub(super) struct Core<R> {
    pub(super) registers: Arc<R>,
    pub(super) capabilities: Capabilities,
    limit: Duration,
}

/// The part that changes.
pub(super) struct State<R> {
    /// Taken once the controller has stopped.
    pub(super) admin: Option<Admin<R>>,
    /// Which I/O queues are in use: index n is queue n+1.
    pub(super) queues: Vec<bool>,
}

impl<D, A, R> Clone for Controller<D, A, R>
where
    D: Domain + 'static,
    A: Allocator + 'static,
    R: Registers,
{
    fn clone(&self) -> Self {
        Controller { inner: Arc::clone(&self.inner) }
    }
}

impl<D, A, R> fmt::Debug for Controller<D, A, R>
where
    D: Domain + 'static,
    A: Allocator + 'static,
    R: Registers,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller")
            .field("identity", &self.inner.identity)
            .field("namespaces", &self.inner.namespaces)
            .finish_non_exhaustive()
    }
}

impl<D, A, R> Controller<D, A, R>
where
    D: Domain<Target = HostAddr> + 'static,
    A: Allocator + 'static,
    R: Registers,
{
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
        let core = Core { registers, capabilities, limit: config.limit };
        core.stop()?;
        let mut bringing_up = BringingUp { core: Some(core), admin: None, device };
        let (granted, identity, namespaces) = bringing_up.go(config)?;
        let Some((core, device)) = bringing_up.core.take().zip(Some(bringing_up.device.clone()))
        else {
            return Err(Error::Stopped);
        };
        let admin = bringing_up.admin.take();
        let state = State { admin, queues: vec![false; granted.into()] };
        let state = Mutex::new(state);
        let inner = Inner { device, config, state, identity, namespaces, core };
        Ok(Controller { inner: Arc::new(inner) })
    }

    /// The controller's identity.
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// The usable namespaces: active ones, of blocks without metadata.
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
        self.inner.core.capabilities.entries - 1
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

impl<R: Registers> Core<R> {
    /// Time-out for the controller to become ready or to stop.
    fn ready_timeout(&self) -> Duration {
        self.capabilities.ready.min(self.limit)
    }

    fn stop(&self) -> Result<(), Error> {
        disable(&*self.registers, self.ready_timeout())
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, R: Registers> Inner<D, A, R> {
    /// The controller's identity.
    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Stops the controller in any state: when this returns it uses no memory any more.
    ///
    /// # Errors
    /// It does not stop.
    pub(super) fn stop(&self) -> Result<(), Error> {
        let mut state = self.state.lock();
        let Some(admin) = &mut state.admin else { return Ok(()) };
        admin.fail(Error::Stopped);
        self.core.stop()?;
        state.admin = None;
        Ok(())
    }

    fn end(&self) -> Result<(), Error> {
        let shut_down = match self.state.lock().admin {
            Some(_) => shut_down(&*self.core.registers, self.core.limit),
            None => Ok(()),
        };
        // Whether or not that succeeded.
        self.stop().and(shut_down)
    }

    /// Whether the device reaches only what is mapped, so that unmapped memory is safe from a
    /// controller that does not stop.
    pub(super) fn is_confined(&self) -> bool {
        self.device.effective_policy() != Policy::Off
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, R: Registers> Drop for Inner<D, A, R> {
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

/// A controller that is starting. If dropped, it is stopped before its memory goes.
struct BringingUp<D: Domain + 'static, A: Allocator + 'static, R: Registers> {
    core: Option<Core<R>>,
    admin: Option<Admin<R>>,
    device: Device<D, A>,
}

impl<D, A, R> BringingUp<D, A, R>
where
    D: Domain<Target = HostAddr> + 'static,
    A: Allocator + 'static,
    R: Registers,
{
    /// The number of queues it grants, its identity, and its namespaces.
    fn go(&mut self, config: ControllerConfig) -> Result<(u16, Identity, Vec<Namespace>), Error> {
        let core = self.core.as_ref().ok_or(Error::Stopped)?;
        let (registers, capabilities) = (&core.registers, core.capabilities);
        let doorbells = capabilities.doorbells(&**registers, 0)?;
        let most = capabilities.entries;
        let admin = Admin::new(&self.device, registers, doorbells, most, config.limit)?;
        let admin = self.admin.insert(admin);
        let (entries, places) = (admin.pair().entries(), admin.pair().places());
        enable(&**registers, entries, places, core.ready_timeout())?;
        let identity = admin.identity()?;
        let granted = admin.queues(config.queues)?;
        Ok((granted, identity, admin.namespaces()?))
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, R: Registers> Drop for BringingUp<D, A, R> {
    fn drop(&mut self) {
        let Some(core) = &self.core else { return };
        if core.stop().is_err() && self.device.effective_policy() == Policy::Off {
            std::mem::forget(self.admin.take());
        }
    }
}
