//! A controller in software, and its driver behind a device of the DMA API.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    sync::Arc,
    time::Duration,
};

use ringfence_dma::{
    BounceLimits, BouncePools, Device, DmaBuffer, DmaConfig, Environment, HostMemory, Policy,
};
use ringfence_drivers::nvme::{Controller, ControllerConfig, Data, Error, IoQueue, Namespace};
use ringfence_iommu::{
    Geometry, HostAddr, PageSizes, Range, SoftDomain, shootdown::Shootdown, table::Limits,
};
use ringfence_iova::{Aperture, Slabs};
use ringfence_mem::{HostSlice, ReadSlice};
use ringfence_sync::cpu::OsCpu;

use crate::{
    bus::SoftBus,
    controller::{Bar, Character, Soft},
};

pub(crate) type Domain = Arc<SoftDomain<HostAddr>>;
pub(crate) type Space = Arc<Slabs<OsCpu>>;
pub(crate) type Disk = Controller<Domain, Space, Bar>;
pub(crate) type Queue<B = Buffer> = IoQueue<Domain, Space, Bar, B>;

/// Longer than a responsive controller takes on a busy machine. One that does not respond lets the
/// time pass.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// Blocks of the disk.
pub(crate) const BLOCKS: usize = 8192;

/// A buffer that begins at any offset in its first page.
pub(crate) struct Buffer {
    memory: *mut u8,
    offset: usize,
    len: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference reads only.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(offset: usize, len: usize) -> Buffer {
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(Self::layout(offset, len)) };
        assert!(!memory.is_null());
        Buffer { memory, offset, len }
    }

    pub(crate) fn holding(offset: usize, bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::new(offset, bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    fn layout(offset: usize, len: usize) -> Layout {
        Layout::from_size_align((offset + len).next_multiple_of(4096), 4096).unwrap()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes lie there, and are this value's.
        unsafe { std::slice::from_raw_parts(self.memory.add(self.offset), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(self.offset), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `new` made it, with this layout.
        unsafe { dealloc(self.memory, Self::layout(self.offset, self.len)) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

// SAFETY: memory of its own that stays where it is.
unsafe impl DmaBuffer<HostAddr> for Buffer {
    fn for_each_segment(&self, each: &mut dyn FnMut(HostAddr, u64)) {
        let at = self.memory.wrapping_add(self.offset).expose_provenance();
        each(HostAddr(at as u64), self.len as u64);
    }
    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        each(self.bytes().into());
        true
    }
    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        each(self.bytes_mut().into());
        true
    }
}

/// The whole setup. Fields are declared in the order of their drop.
pub(crate) struct Rig {
    pub(crate) disk: Result<Disk, Error>,
    pub(crate) device: Device<Domain, Space>,
    pub(crate) soft: Soft,
    pub(crate) domain: Domain,
}

impl Rig {
    pub(crate) fn new(policy: Policy) -> Rig {
        Rig::with(policy, Character::GOOD)
    }

    pub(crate) fn with(policy: Policy, character: Character) -> Rig {
        let sizes = PageSizes::from_granule(4096).unwrap();
        let geometry = Geometry::new(sizes, Range::ALL);
        let domain = SoftDomain::<HostAddr>::new(geometry, Limits::NONE, Shootdown::new(2));
        let aperture = Aperture::new(0, (1 << 40) - 1, 4096).unwrap();
        let space = Arc::new(Slabs::new(aperture, OsCpu::new()));
        let limits = BounceLimits::default();
        let for_pools = (Arc::clone(&domain), Arc::clone(&space));
        let pools = BouncePools::new(for_pools.0, for_pools.1, HostMemory, limits).unwrap();
        let config = DmaConfig::new(policy);
        let environment = Environment::default();
        let device = Device::builder(Arc::clone(&domain))
            .allocator(space)
            .config(config)
            .environment(environment)
            .pools(&pools)
            .build()
            .unwrap();
        assert_eq!(device.effective_policy(), policy);
        let bus = SoftBus::new(&domain, policy == Policy::Off);
        let soft = Soft::new(BLOCKS, bus, character);
        let config = ControllerConfig { limit: LIMIT, ..ControllerConfig::default() };
        let disk = Controller::start(device.clone(), soft.bar(), config);
        Rig { disk, device, soft, domain }
    }

    pub(crate) fn disk(&self) -> &Disk {
        self.disk.as_ref().unwrap()
    }

    pub(crate) fn space(&self) -> Namespace {
        self.disk().namespaces()[0]
    }

    pub(crate) fn queue(&self, depth: u32) -> Queue {
        self.disk().queue(depth).unwrap()
    }
}

/// Bytes that identify their place.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

/// The bytes of a buffer that came back.
pub(crate) fn bytes(data: Data<Buffer>) -> Vec<u8> {
    match data {
        Data::Buffer(buffer) => buffer.bytes().to_vec(),
        Data::Pooled(buffer) => buffer.piece().to_vec(),
        other => panic!("{other:?} has no bytes of its own"),
    }
}
