//! An iommufd.

mod hardware;
mod ioas;

use std::{collections::BTreeMap, fmt, sync::Arc};

use parking_lot::Mutex;
use ringfence_iommu::{Iova, Range, ReservedRegion};
use rustix::io::Errno;

use self::{
    hardware::{Device, Hwpt},
    ioas::Ioas,
};
use super::{
    Group,
    copy::{Refused, load, store},
    events::Event,
    faults::Step,
    memory::Memory,
    owner::Owner,
    pins::Machine,
};
use ringfence_vfio::kernel::{
    Bitmap, Id, IommufdKernel, IovaRanges, KernelResult, Locked, MapFlags,
};

/// An iommufd in this process: address spaces, hardware page tables made from them, and devices. A
/// clone is the same one.
///
/// As in the kernel, pages are pinned and charged only while their address space has a page table,
/// and only once, however many page tables there are. The process that mapped them is charged,
/// unless it held `CAP_IPC_LOCK` then.
#[derive(Clone)]
pub struct Iommufd(Arc<Mutex<State>>);

struct State {
    machine: Machine,
    caller: Owner,
    next: u32,
    ioas: BTreeMap<Id, Ioas>,
    hwpts: BTreeMap<Id, Hwpt>,
    devices: BTreeMap<Id, Device>,
    refused: Vec<Refused>,
}

impl Iommufd {
    /// An iommufd without objects, for the calls and the memory of `owner`.
    pub fn new(owner: Owner, memory: Memory) -> Iommufd {
        Iommufd(Arc::new(Mutex::new(State {
            machine: Machine::new(memory, true),
            caller: owner,
            next: 1,
            ioas: BTreeMap::new(),
            hwpts: BTreeMap::new(),
            devices: BTreeMap::new(),
            refused: Vec::new(),
        })))
    }

    /// Binds a device, the only one of its group. `tracks_dirty`: its IOMMU can report which pages
    /// it wrote.
    pub fn bind(&self, group: &Group, tracks_dirty: bool) -> Id {
        let mut state = self.0.lock();
        let id = state.new_id();
        state.devices.insert(id, Device { group: group.clone(), tracks_dirty, hwpt: None });
        id
    }

    /// Attaches a device to a page table, or to an address space, from which a page table is then
    /// made. A device that is attached already changes over. Returns the page table that it uses
    /// then.
    ///
    /// # Errors
    /// ENOENT; EINVAL if the page table does not suit the device; EADDRINUSE where the device's
    /// limits conflict with mappings or with what was [allowed](Self::allow); ENOMEM, EFAULT as for
    /// a map.
    pub fn attach(&self, device: Id, to: Id) -> KernelResult<Id> {
        self.0.lock().attach(device, to)
    }

    /// Detaches a device; a page table that attaching made for it is removed.
    ///
    /// # Errors
    /// ENOENT; EINVAL if it is not attached.
    pub fn detach(&self, device: Id) -> KernelResult<()> {
        self.0.lock().detach(device)
    }

    /// Sets the ranges that must stay mappable whatever device is attached; addresses are chosen
    /// from them. Replaces the ranges set before (`IOMMU_IOAS_ALLOW_IOVAS`).
    ///
    /// # Errors
    /// ENOENT; EINVAL where ranges overlap; EADDRINUSE where one is not mappable now.
    pub fn allow(&self, ioas: Id, ranges: &[Range]) -> KernelResult<()> {
        self.0.lock().allow(ioas, ranges)
    }

    /// From now on another process calls; its memory is the same.
    pub fn set_caller(&self, owner: &Owner) {
        self.0.lock().caller = owner.clone();
    }

    /// How many ordinary pages of 4 KiB are pinned.
    pub fn pinned(&self) -> u64 {
        self.0.lock().machine.pinned
    }

    /// The events since the last call; at most a million are kept.
    pub fn events(&self) -> Vec<Event> {
        self.0.lock().machine.log.take()
    }

    /// Makes the `nth` step of a kind from now on fail; 1 is the next one.
    pub fn fail(&self, step: Step, nth: u64) {
        self.0.lock().machine.faults.fail(step, nth);
    }

    /// Clears pending failures; returns whether there were any.
    pub fn heal(&self) -> bool {
        self.0.lock().machine.faults.clear()
    }

    /// A device reads memory.
    ///
    /// # Errors
    /// The refused access; the bytes before it have been read.
    pub fn dma_read(&self, device: Id, iova: u64, into: &mut [u8]) -> Result<(), Refused> {
        self.0.lock().pieces(device, iova, into.len(), false, |addr, piece| {
            // SAFETY: the caller of `map` promised that mapped memory exists and belongs to the
            // devices until it is unmapped, and it cannot be unmapped while the state is locked.
            unsafe { load(addr, &mut into[piece]) };
        })
    }

    /// A device writes memory.
    ///
    /// # Errors
    /// The refused access; the bytes before it have been written.
    pub fn dma_write(&self, device: Id, iova: u64, bytes: &[u8]) -> Result<(), Refused> {
        self.0.lock().pieces(device, iova, bytes.len(), true, |addr, piece| {
            // SAFETY: as in `dma_read`; by the flags, the caller also promised that devices may
            // write it.
            unsafe { store(addr, &bytes[piece]) };
        })
    }

    /// The accesses refused since the last call, the first 1,024 of them.
    pub fn refused(&self) -> Vec<Refused> {
        std::mem::take(&mut self.0.lock().refused)
    }
}

impl State {
    fn new_id(&mut self) -> Id {
        // Ids are not reused before four billion objects were made.
        let taken = |state: &State, id: Id| {
            state.ioas.contains_key(&id)
                || state.hwpts.contains_key(&id)
                || state.devices.contains_key(&id)
        };
        while taken(self, Id::new(self.next)) || self.next == 0 {
            self.next = self.next.wrapping_add(1);
        }
        let id = Id::new(self.next);
        self.next = self.next.wrapping_add(1);
        id
    }

    fn destroy(&mut self, id: Id) -> KernelResult<()> {
        if self.devices.contains_key(&id) {
            return Err(Errno::BUSY);
        }
        if self.hwpts.contains_key(&id) {
            if self.devices.values().any(|device| device.hwpt == Some(id)) {
                return Err(Errno::BUSY);
            }
            self.remove_hwpt(id);
            return Ok(());
        }
        if !self.ioas.contains_key(&id) {
            return Err(Errno::NOENT);
        }
        if self.hwpts.values().any(|hwpt| hwpt.ioas == id) {
            return Err(Errno::BUSY);
        }
        // It has no page table, so none of it is pinned.
        self.ioas.remove(&id);
        Ok(())
    }
}

// The callers of `dma_read` and `dma_write` are the devices of this iommufd; they touch only what
// is mapped.
impl IommufdKernel for Iommufd {
    fn new_ioas(&self) -> KernelResult<Id> {
        let mut state = self.0.lock();
        if state.machine.faults.hits(Step::Record) {
            return Err(Errno::NOMEM);
        }
        let id = state.new_id();
        state.ioas.insert(id, Ioas::default());
        Ok(id)
    }

    fn destroy(&self, id: Id) -> KernelResult<()> {
        self.0.lock().destroy(id)
    }

    fn iova_ranges(&self, ioas: Id) -> KernelResult<IovaRanges> {
        self.0.lock().iova_ranges(ioas)
    }

    unsafe fn map(
        &self,
        ioas: Id,
        flags: MapFlags,
        iova: Option<u64>,
        vaddr: u64,
        size: u64,
    ) -> KernelResult<u64> {
        self.0.lock().map(ioas, flags, iova, vaddr, size)
    }

    fn unmap(&self, ioas: Id, iova: u64, size: u64) -> KernelResult<u64> {
        self.0.lock().unmap(ioas, iova, size)
    }

    fn new_hwpt(&self, device: Id, ioas: Id, dirty: bool) -> KernelResult<Id> {
        self.0.lock().new_hwpt(device, ioas, dirty, false)
    }

    fn track_dirty(&self, hwpt: Id, on: bool) -> KernelResult<()> {
        self.0.lock().track(hwpt, on)
    }

    fn dirty(&self, hwpt: Id, iova: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()> {
        self.0.lock().read_dirty(hwpt, iova, size, dirty)
    }

    fn reserved_regions(&self) -> Vec<ReservedRegion> {
        let state = self.0.lock();
        let of = |device: &Device| device.group.reserved.clone();
        let mut regions: Vec<_> = state.devices.values().flat_map(of).collect();
        regions.sort_by_key(|region| region.range);
        regions
    }

    fn locked(&self) -> Option<Locked> {
        self.0.lock().caller.locked()
    }
}

impl Default for Iommufd {
    /// For this process's memory, without a limit.
    fn default() -> Iommufd {
        Iommufd::new(Owner::default(), Memory::process())
    }
}

impl fmt::Debug for Iommufd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.lock();
        f.debug_struct("Iommufd")
            .field("ioas", &state.ioas.keys())
            .field("hwpts", &state.hwpts.keys())
            .field("devices", &state.devices.keys())
            .field("pinned", &state.machine.pinned)
            .finish_non_exhaustive()
    }
}

/// `size` bytes from `iova` on, as iommufd checks them: EOVERFLOW if they wrap or reach the very
/// end, EINVAL if there are none.
fn bytes(iova: u64, size: u64) -> KernelResult<Range> {
    if iova == u64::MAX || size == u64::MAX {
        return Err(Errno::OVERFLOW);
    }
    if size == 0 {
        return Err(Errno::INVAL);
    }
    Range::from_len(Iova(iova), size).ok_or(Errno::OVERFLOW)
}
