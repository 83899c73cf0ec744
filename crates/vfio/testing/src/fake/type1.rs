//! A type1 container.

mod attach;
mod device;
mod dirty;
mod external;
mod map;
mod mapping;
mod unmap;

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::Arc,
};

use parking_lot::Mutex;
use ringfence_iommu::{Iova, Range, ReservedRegion};
use rustix::io::Errno;

pub use attach::Group;
pub use external::Notify;

use self::{
    attach::{Domain, Member, MemberKind},
    mapping::Mapping,
};
use super::{
    PAGE, copy::Refused, events::Event, faults::Step, memory::Memory, owner::Owner, pins::Machine,
};
use ringfence_vfio::kernel::{
    Bitmap, DirtyInfo, Extension, KernelResult, Locked, MapFlags, Type1Info, Type1Kernel,
    UnmapFlags,
};

/// Most pages, and bytes, of one bitmap (rule L63).
const BITMAP_PAGES: u64 = (1 << 31) - 1;
const BITMAP_BYTES: u64 = 1 << 28;

/// The settings of a container.
#[derive(Clone, Debug)]
pub struct FakeConfig {
    /// How many mappings there may be at once.
    pub budget: u32,
    /// Whether it is a type1v1 container, in which UNMAP differs (rule [L55]).
    ///
    /// [L55]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l55
    pub v1: bool,
    /// Whether huge pages are enabled: pages are pinned in batches (rule [L52]).
    ///
    /// [L52]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l52
    pub huge_pages: bool,
    /// Whether groups without interrupt remapping may be attached (`allow_unsafe_interrupts`).
    pub unsafe_interrupts: bool,
    /// The process that calls at first.
    pub owner: Owner,
    /// Its memory.
    pub memory: Memory,
    /// Most runs of an IOMMU; more are ENOMEM.
    pub runs: usize,
}

impl Default for FakeConfig {
    /// Linux's defaults, for this process's memory, without a limit.
    fn default() -> FakeConfig {
        FakeConfig {
            budget: 65_535,
            v1: false,
            huge_pages: true,
            unsafe_interrupts: false,
            owner: Owner::default(),
            memory: Memory::process(),
            runs: 1 << 20,
        }
    }
}

/// A type1 container in this process (rules [L51]-[L63]). A clone is the same one.
///
/// Until a group is [attached](Self::attach) everything is EINVAL, as with a container without an
/// IOMMU. [`Type1::default`] has a group.
///
/// [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
/// [L63]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l63
#[derive(Clone)]
pub struct Type1 {
    v1: bool,
    unsafe_interrupts: bool,
    runs: usize,
    state: Arc<Mutex<State>>,
}

/// All mutable state.
struct State {
    machine: Machine,
    caller: Owner,
    mappings: BTreeMap<u64, Mapping>,
    available: u32,
    domains: Vec<Domain>,
    members: Vec<Member>,
    /// What may be mapped; empty: everything.
    ranges: Vec<Range>,
    page_sizes: u64,
    tracking: bool,
    /// How many mappings have an address that is marked invalid.
    invalid: u64,
    refused: VecDeque<Refused>,
}

impl Type1 {
    /// A container without a group.
    pub fn new(config: FakeConfig) -> Type1 {
        Type1 {
            v1: config.v1,
            unsafe_interrupts: config.unsafe_interrupts,
            runs: config.runs,
            state: Arc::new(Mutex::new(State {
                machine: Machine::new(config.memory, config.huge_pages),
                caller: config.owner,
                mappings: BTreeMap::new(),
                available: config.budget,
                domains: Vec::new(),
                members: Vec::new(),
                ranges: Vec::new(),
                page_sizes: attach::ANY_PAGES,
                tracking: false,
                invalid: 0,
                refused: VecDeque::new(),
            })),
        }
    }

    /// From now on another process calls; its memory is the same.
    pub fn set_caller(&self, owner: &Owner) {
        self.state.lock().caller = owner.clone();
    }

    /// Which process calls now.
    pub fn caller(&self) -> Owner {
        self.state.lock().caller.clone()
    }

    /// How many pins of ordinary pages of 4 KiB there are, by mappings and external.
    pub fn pinned(&self) -> u64 {
        self.state.lock().machine.pinned
    }

    /// How many mappings there are.
    pub fn mappings(&self) -> usize {
        self.state.lock().mappings.len()
    }

    /// The events since the last call; at most a million are kept.
    pub fn events(&self) -> Vec<Event> {
        self.state.lock().machine.log.take()
    }

    /// Makes the `nth` step of a kind from now on fail; 1 is the next one.
    pub fn fail(&self, step: Step, nth: u64) {
        self.state.lock().machine.faults.fail(step, nth);
    }

    /// Clears pending failures; returns whether there were any.
    pub fn heal(&self) -> bool {
        self.state.lock().machine.faults.clear()
    }

    /// The state, if there is a group.
    fn attached(&self) -> KernelResult<parking_lot::MutexGuard<'_, State>> {
        let state = self.state.lock();
        if state.members.is_empty() { Err(Errno::INVAL) } else { Ok(state) }
    }
}

impl State {
    /// The smallest page that can be mapped: the alignment of addresses.
    fn granule(&self) -> u64 {
        1 << self.page_sizes.trailing_zeros()
    }

    /// Whether all of `range` may be mapped.
    fn allows(&self, range: Range) -> bool {
        self.ranges.is_empty() || self.ranges.iter().any(|allowed| allowed.covers(range))
    }

    /// The first mapping that overlaps `range`.
    fn find(&self, range: Range) -> Option<&Mapping> {
        let before = self.mappings.range(..=range.first().0).next_back().map(|(_, found)| found);
        before.filter(|found| found.range.overlaps(range)).or_else(|| {
            let mut inside = self.mappings.range(range.first().0..=range.last().0);
            inside.next().map(|(_, found)| found)
        })
    }

    /// The mapping that contains `iova`.
    fn at(&self, iova: u64) -> Option<&Mapping> {
        self.find(Range::new(Iova(iova), Iova(iova))?)
    }

    /// Whether `range` begins or ends inside of a mapping.
    fn bisects(&self, range: Range) -> bool {
        let first = self.at(range.first().0).is_some_and(|at| at.range.first() != range.first());
        let last = self.at(range.last().0).is_some_and(|at| at.range.last() != range.last());
        first || last
    }
}

// SAFETY of what `map` promises: the callers of `dma_read`, `dma_write` and `dma_rw` are the
// devices of this container, and these touch only what is mapped.
impl Type1Kernel for Type1 {
    fn info(&self) -> KernelResult<Type1Info> {
        let state = self.attached()?;
        Ok(Type1Info {
            page_sizes: state.page_sizes,
            ranges: (!state.ranges.is_empty()).then(|| state.ranges.clone()),
            available: Some(state.available),
            dirty: (!self.v1)
                .then(|| DirtyInfo { page_sizes: state.granule(), max_bytes: BITMAP_BYTES }),
        })
    }

    fn has(&self, extension: Extension) -> bool {
        match extension {
            Extension::UnmapAll => true,
            Extension::UpdateVaddr => !self.state.lock().has_emulated(),
            // An extension that it does not know.
            _ => false,
        }
    }

    unsafe fn map(&self, flags: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        self.attached()?.map(flags, iova, vaddr, size)
    }

    fn unmap(
        &self,
        flags: UnmapFlags,
        iova: u64,
        size: u64,
        dirty: Option<Bitmap<'_>>,
    ) -> KernelResult<u64> {
        self.unmap_range(flags, iova, size, dirty)
    }

    fn track_dirty(&self, on: bool) -> KernelResult<()> {
        if self.v1 { Err(Errno::ACCESS) } else { self.attached()?.track(on) }
    }

    fn dirty(&self, iova: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()> {
        if self.v1 { Err(Errno::ACCESS) } else { self.attached()?.read_dirty(iova, size, dirty) }
    }

    fn reserved_regions(&self) -> Vec<ReservedRegion> {
        let state = self.state.lock();
        let of = |member: &Member| match &member.kind {
            MemberKind::Hardware(group) => group.reserved.clone(),
            MemberKind::Emulated(_) => Vec::new(),
        };
        let mut regions: Vec<_> = state.members.iter().flat_map(of).collect();
        regions.sort_by_key(|region| region.range);
        regions
    }

    fn locked(&self) -> Option<Locked> {
        self.state.lock().caller.locked()
    }
}

impl Default for Type1 {
    /// A container with the settings of [`FakeConfig::default`] and one [group](Group::default).
    fn default() -> Type1 {
        let container = Type1::new(FakeConfig::default());
        // There are no mappings that could conflict with a group.
        let attached = container.attach(&Group::default());
        debug_assert_eq!(attached, Ok(()));
        container
    }
}

impl fmt::Debug for Type1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Type1")
            .field("mappings", &state.mappings.len())
            .field("available", &state.available)
            .field("pinned", &state.machine.pinned)
            .finish_non_exhaustive()
    }
}

/// A range of whole pages of `granule` bytes; EINVAL if it is not, or wraps.
fn whole(iova: u64, size: u64, granule: u64) -> KernelResult<Range> {
    if (iova | size) & (granule - 1) != 0 {
        return Err(Errno::INVAL);
    }
    Range::from_len(Iova(iova), size).ok_or(Errno::INVAL)
}
