//! Memory with bytes: buffers that can be copied, and slots to copy them to.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    collections::BTreeMap,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use ringfence_dma::{
    BounceLimits, BounceMemory, BouncePools, Chunk, Device, DmaBuffer, Environment, SharedMemory,
};
use ringfence_iommu::GuestPhys;
use ringfence_mem::{HostSlice, ReadSlice};
use ringfence_sync::{clock::ManualClock, cpu::FixedCpu};

use crate::mock::{Bench, EagerAllocator, MockDomain, Setup};

/// The first address of slot memory; buffers lie below.
pub(crate) const SLOTS: u64 = 0x80_0000;
/// The end of all memory.
pub(crate) const END: u64 = 0xa0_0000;
/// The contents of slot memory when it is taken, as left by its last owner.
const LEFT: u8 = 0xee;

/// Memory, with addresses from 0 on, accessed only by copies.
#[derive(Debug)]
pub(crate) struct Ram(NonNull<u8>);

// SAFETY: it is plain bytes, which each test touches from one thread at a time.
unsafe impl Send for Ram {}
// SAFETY: as above.
unsafe impl Sync for Ram {}

impl Ram {
    fn layout() -> Layout {
        Layout::from_size_align(END as usize, 4096).unwrap()
    }

    pub(crate) fn new() -> Arc<Ram> {
        // SAFETY: the layout is not empty.
        Arc::new(Ram(NonNull::new(unsafe { alloc_zeroed(Ram::layout()) }).unwrap()))
    }

    fn at(&self, addr: u64, len: usize) -> NonNull<u8> {
        assert!(addr.checked_add(len as u64).is_some_and(|end| end <= END), "{addr:#x}");
        // SAFETY: within the memory.
        unsafe { self.0.add(addr as usize) }
    }

    pub(crate) fn read(&self, addr: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        // SAFETY: that many bytes are there.
        unsafe {
            self.at(addr, bytes.len())
                .copy_to_nonoverlapping(NonNull::new(bytes.as_mut_ptr()).unwrap(), bytes.len())
        };
        bytes
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        // SAFETY: that many bytes are there, and they do not overlap the source.
        unsafe {
            self.at(addr, bytes.len())
                .as_ptr()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    /// A buffer of these pieces.
    pub(crate) fn buffer(self: &Arc<Self>, pieces: &[(u64, u64)]) -> RamBuf {
        RamBuf { ram: Arc::clone(self), pieces: pieces.to_vec(), hidden: false }
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: `new` made it, with this layout.
        unsafe { dealloc(self.0.as_ptr(), Ram::layout()) }
    }
}

/// A buffer of pieces of the memory.
#[derive(Debug)]
pub(crate) struct RamBuf {
    ram: Arc<Ram>,
    pub(crate) pieces: Vec<(u64, u64)>,
    /// Whether the CPU cannot reach it.
    hidden: bool,
}

impl RamBuf {
    /// The same buffer, out of the CPU's reach.
    pub(crate) fn hidden(self) -> RamBuf {
        RamBuf { hidden: true, ..self }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.pieces.iter().flat_map(|&(addr, len)| self.ram.read(addr, len)).collect()
    }
}

// SAFETY: the memory stays where it is while `ram` lives; in a test that gives a byte to two
// buffers no reference to it outlives a call.
unsafe impl DmaBuffer<GuestPhys> for RamBuf {
    fn for_each_segment(&self, each: &mut dyn FnMut(GuestPhys, u64)) {
        self.pieces.iter().for_each(|&(addr, len)| each(GuestPhys(addr), len));
    }

    fn for_each_slice(&self, each: &mut dyn FnMut(ReadSlice<'_>)) -> bool {
        for &(addr, len) in self.pieces.iter().filter(|_| !self.hidden) {
            let at = self.ram.at(addr, len as usize);
            // SAFETY: that many bytes are there, and no reference to them exists.
            each(unsafe { HostSlice::new(at, len as usize) }.into());
        }
        !self.hidden
    }

    fn for_each_slice_mut(&mut self, each: &mut dyn FnMut(HostSlice<'_>)) -> bool {
        for &(addr, len) in self.pieces.iter().filter(|_| !self.hidden) {
            let at = self.ram.at(addr, len as usize);
            // SAFETY: as above.
            each(unsafe { HostSlice::new(at, len as usize) });
        }
        !self.hidden
    }
}

// SAFETY: its bytes are accessed only by copies.
unsafe impl SharedMemory for RamBuf {}

/// Memory for slots that records what is taken.
pub(crate) struct RamSlots {
    ram: Arc<Ram>,
    book: Mutex<Book>,
    /// How many bytes may be taken at a time.
    room: u64,
}

#[derive(Default)]
struct Book {
    /// What is taken: address and length.
    out: BTreeMap<u64, u64>,
    /// What was taken since the last call of `fresh`.
    fresh: Vec<(u64, u64)>,
}

impl RamSlots {
    /// What is taken now: address and length.
    pub(crate) fn out(&self) -> BTreeMap<u64, u64> {
        self.book.lock().unwrap().out.clone()
    }

    /// What was taken since the last call.
    pub(crate) fn fresh(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.book.lock().unwrap().fresh)
    }
}

struct Shared(Arc<RamSlots>);

// SAFETY: what is taken lies in the memory for slots, does not overlap anything else that is taken,
// and stays there while `ram` lives.
unsafe impl BounceMemory<GuestPhys> for Shared {
    fn take(&self, len: u64, align: u64) -> Option<Chunk<GuestPhys>> {
        let RamSlots { ram, book, room } = &*self.0;
        let mut book = book.lock().unwrap();
        let sum: u64 = book.out.values().sum();
        if sum.checked_add(len)? > *room {
            return None;
        }
        let mut at = SLOTS;
        for (&held, &held_len) in &book.out {
            if at.checked_add(len)? <= held {
                break;
            }
            at = (held + held_len).max(at).checked_next_multiple_of(align)?;
        }
        at.checked_add(len).filter(|&end| end <= END)?;
        book.out.insert(at, len);
        book.fresh.push((at, len));
        ram.write(at, &vec![LEFT; len as usize]);
        Some(Chunk { target: GuestPhys(at), ptr: ram.at(at, len as usize), len, align })
    }

    unsafe fn give_back(&self, chunk: Chunk<GuestPhys>) {
        let held = self.0.book.lock().unwrap().out.remove(&chunk.target.0);
        assert_eq!(held, Some(chunk.len), "what is given back was taken");
    }
}

/// A bench whose device has pools.
pub(crate) struct Pooled {
    pub(crate) bench: Bench,
    pub(crate) pools: BouncePools<GuestPhys>,
    pub(crate) memory: Arc<RamSlots>,
    pub(crate) ram: Arc<Ram>,
}

impl Pooled {
    pub(crate) fn new(setup: Setup) -> Pooled {
        Pooled::with(setup, BounceLimits::default(), END - SLOTS)
    }

    /// With pools of these limits, and `room` bytes of memory for them.
    pub(crate) fn with(setup: Setup, limits: BounceLimits, room: u64) -> Pooled {
        let Setup { granule, capabilities, limits: table, config, thread_clock, .. } = setup;
        let domain = MockDomain::new(granule, capabilities, table);
        let allocator = EagerAllocator::new(granule.max(4096), Arc::clone(&domain.log));
        let (clock, cpu) = (Arc::new(ManualClock::new(1_000_000)), Arc::new(FixedCpu::new(2)));
        let ram = Ram::new();
        let memory = Arc::new(RamSlots { ram: Arc::clone(&ram), book: Mutex::default(), room });
        let pools = BouncePools::new(
            Arc::clone(&domain) as _,
            Arc::clone(&allocator) as _,
            Shared(Arc::clone(&memory)),
            limits,
        )
        .unwrap();
        let environment = Environment {
            clock: Arc::clone(&clock) as _,
            cpu: Arc::clone(&cpu) as _,
            thread_clock,
        };
        let device = Device::builder(Arc::clone(&domain))
            .allocator(Arc::clone(&allocator))
            .config(config)
            .environment(environment)
            .pools(&pools)
            .build()
            .unwrap();
        Pooled { bench: Bench { device, domain, allocator, clock, cpu }, pools, memory, ram }
    }

    /// The target that the device reaches at `iova`, to read or to write.
    fn reach(&self, iova: u64, write: bool) -> Option<u64> {
        use ringfence_iommu::Prot;
        let (target, prot) = self.bench.domain.reach(iova)?;
        prot.allows(if write { Prot::WRITE } else { Prot::READ }).then_some(target)
    }

    /// What the device reads there; `None` if it may not.
    pub(crate) fn device_reads(&self, iova: u64, len: u64) -> Option<Vec<u8>> {
        let byte = |n| Some(self.ram.read(self.reach(iova + n, false)?, 1)[0]);
        (0..len).map(byte).collect()
    }

    /// Writes there as the device; false if it may not.
    pub(crate) fn device_writes(&self, iova: u64, bytes: &[u8]) -> bool {
        (iova..).zip(bytes).all(|(iova, byte)| match self.reach(iova, true) {
            Some(target) => {
                self.ram.write(target, &[*byte]);
                true
            }
            None => false,
        })
    }

    /// Ends the test: neither slots nor their memory are lost.
    pub(crate) fn assert_no_slot_is_lost(self) {
        let stats = self.pools.stats();
        assert_eq!((stats.slots, stats.slot_bytes), (0, 0), "a slot is lost");
        self.pools.trim();
        assert_eq!(self.pools.stats().kept_bytes, 0);
        assert!(self.memory.out().is_empty(), "memory of slots is lost");
        assert_eq!(self.bench.domain.table.mappings(), 0, "a translation is left");
        assert_eq!(self.bench.domain.cached(), [], "the device still reaches something");
        let Pooled { bench: Bench { device, allocator, .. }, pools, .. } = self;
        drop((device, pools));
        assert_eq!(allocator.live(), 0, "an IOVA is lost");
    }
}
