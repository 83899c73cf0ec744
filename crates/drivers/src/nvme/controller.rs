//! A controller: brought up, asked who it is, and brought down before its memory goes.

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
    /// How many I/O queues are asked for. The controller may grant fewer. Default: 8.
    pub queues: u16,
    /// For how long nothing may be completed while commands are under way, and the controller may
    /// take to become ready or to stop, whatever time it asks for. Default: 30 s.
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

/// What it takes to talk to a controller at all.
pub(super) struct Core<R> {
    pub(super) registers: Arc<R>,
    pub(super) capabilities: Capabilities,
    limit: Duration,
}

/// What changes.
pub(super) struct State<R> {
    /// Taken once the controller has stopped.
    pub(super) admin: Option<Admin<R>>,
    /// Which I/O queues are in use: number n+1 is the nth.
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
    /// Resets the controller with these registers, which reaches memory through `device`, and starts
    /// it.
    ///
    /// # Errors
    /// It is gone, cannot be used, fails, or takes too long. Then it is stopped again.
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

    /// Who it says it is.
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// The namespaces that can be used: active ones, of blocks without metadata.
    pub fn namespaces(&self) -> &[Namespace] {
        &self.inner.namespaces
    }

    /// The device that it reaches memory through.
    pub fn device(&self) -> &Device<D, A> {
        &self.inner.device
    }

    /// How many I/O queues there can be at a time.
    pub fn queues(&self) -> usize {
        self.inner.state.lock().queues.len()
    }

    /// The most commands that may be under way in one queue.
    pub fn depth(&self) -> u32 {
        self.inner.core.capabilities.entries - 1
    }

    /// Shuts the controller down in order: its caches are written, and it has stopped. Commands that
    /// are under way are lost, and queues answer with [`Error::Stopped`] from now on.
    ///
    /// # Errors
    /// It does not stop, or had failed before.
    pub fn shut_down(&self) -> Result<(), Error> {
        self.inner.end()
    }
}

impl<R: Registers> Core<R> {
    /// How long the controller may take to become ready or to stop.
    fn patience(&self) -> Duration {
        self.capabilities.ready.min(self.limit)
    }

    fn stop(&self) -> Result<(), Error> {
        disable(&*self.registers, self.patience())
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, R: Registers> Inner<D, A, R> {
    /// Who the controller says it is.
    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Stops the controller, whatever it is at: when this returns it uses no memory any more.
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
        // Whatever came of it.
        self.stop().and(shut_down)
    }

    /// Whether the device reaches no more than what is mapped, so that what is unmapped is safe from a
    /// controller that does not stop.
    pub(super) fn is_confined(&self) -> bool {
        self.device.effective_policy() != Policy::Off
    }
}

impl<D: Domain + 'static, A: Allocator + 'static, R: Registers> Drop for Inner<D, A, R> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!(%error, "an NVMe controller that is given up");
        }
        // One that does not stop keeps its memory, where nothing else keeps it from it.
        if !self.is_confined() {
            std::mem::forget(self.state.lock().admin.take());
        }
    }
}

/// A controller until it runs. Dropped before, it is stopped before its memory goes.
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
    /// How many queues it grants, who it is, and what it has.
    fn go(&mut self, config: ControllerConfig) -> Result<(u16, Identity, Vec<Namespace>), Error> {
        let core = self.core.as_ref().ok_or(Error::Stopped)?;
        let (registers, capabilities) = (&core.registers, core.capabilities);
        let doorbells = capabilities.doorbells(&**registers, 0)?;
        let most = capabilities.entries;
        let admin = Admin::new(&self.device, registers, doorbells, most, config.limit)?;
        let admin = self.admin.insert(admin);
        let (entries, places) = (admin.pair().entries(), admin.pair().places());
        enable(&**registers, entries, places, core.patience())?;
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
