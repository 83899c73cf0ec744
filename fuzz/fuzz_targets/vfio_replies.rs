//! A hostile kernel's results for VFIO's domains.
//!
//! The parsers are `vfio/src/kernel/{info,chain}.rs` (the reply to `VFIO_IOMMU_GET_INFO`, with its chain of
//! capabilities), which are compiled in here as they are, and what `vfio/src/space.rs`,
//! `space/geometry.rs`, `type1.rs` and `iommufd.rs` make of page sizes, ranges, error numbers, the sizes of unmaps
//! and the bits of bitmaps. Judged by a naive record of every request: nothing is mapped that the kernel did not
//! allow, twice, or with an address that wraps; what a domain no longer holds the kernel has reported
//! as removed, or as not there; what it holds it translates; a map that fails leaves nothing unless the kernel
//! would not take it back; bitmaps fit; nothing is repeated without end.
#![no_main]

mod kernel;

use std::{collections::BTreeMap, sync::Arc};

use libfuzzer_sys::fuzz_target;
use parking_lot::Mutex;
use ringfence_iommu::{Domain, Error, Gather, HostAddr, Iova, Map, Prot, Range};
use ringfence_vfio::{
    DirtyMap, Iommufd, Tuning, Type1,
    kernel::{
        Bitmap, Extension, Id, IommufdKernel, IovaRanges, KernelResult, MapFlags, Type1Info,
        Type1Kernel, UnmapFlags,
    },
};
use rustix::io::Errno;

const ERRNOS: [Errno; 8] = [
    Errno::EXIST,
    Errno::NOSPC,
    Errno::NOMEM,
    Errno::INVAL,
    Errno::NODEV,
    Errno::NOENT,
    Errno::PERM,
    Errno::RANGE,
];
/// Dirty bits of more bytes are not asked for.
const MOST_BITS: u64 = 1 << 20;

/// The lowest bit of some page sizes.
fn lowest(sizes: u64) -> u64 {
    sizes & sizes.wrapping_neg()
}

/// The kernel: the calls it got, and how it behaves.
#[derive(Clone)]
struct Hostile(Arc<Mutex<State>>);

struct State {
    info: Type1Info,
    /// How it behaves: 0 as an honest one, at the end too.
    choices: Vec<u8>,
    /// What it has mapped, according to its results: first and last.
    mapped: BTreeMap<u64, u64>,
    calls: u64,
    /// Whether it has refused to take something back.
    keeps: bool,
    /// Whether everything that it did was honest.
    honest: bool,
    unmap_all: bool,
}

impl State {
    fn choice(&mut self) -> u8 {
        self.calls += 1;
        assert!(self.calls < 20_000, "it is asked without end");
        let choice = self.choices.pop().unwrap_or(0);
        self.honest &= choice == 0;
        choice
    }

    fn map(&mut self, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        let choice = self.choice();
        let last = iova.checked_add(size - 1).expect("no range wraps");
        vaddr.checked_add(size - 1).expect("no address wraps");
        let granule = lowest(self.info.page_sizes).max(1);
        assert_eq!([iova % granule, size % granule, vaddr % granule], [0; 3]);
        let allowed = self.info.ranges.as_deref().unwrap_or(&[Range::ALL]);
        // Ranges may touch or overlap: walk through them.
        let mut at = iova;
        loop {
            let end = allowed.iter().filter(|it| it.contains(Iova(at))).map(|it| it.last().0).max();
            let end = end.unwrap_or_else(|| panic!("{at:#x} cannot be mapped"));
            if end >= last {
                break;
            }
            at = end + 1;
        }
        let before = self.mapped.range(..=last).next_back();
        if before.is_some_and(|(_, &end)| end >= iova) {
            // What it has reported as removed was not.
            assert!(!self.honest, "{iova:#x} is mapped already");
            return Err(Errno::EXIST);
        }
        if choice & 1 != 0 {
            return Err(ERRNOS[usize::from(choice / 2 % 8)]);
        }
        self.mapped.insert(iova, last);
        Ok(())
    }

    fn unmap(&mut self, iova: u64, last: u64) -> KernelResult<u64> {
        let choice = self.choice();
        let whole: Vec<u64> =
            self.mapped.range(iova..=last).filter(|it| *it.1 <= last).map(|it| *it.0).collect();
        let mut bytes = 0_u64;
        let some = match choice % 8 {
            // A part of it, nothing at all, or an error.
            1 | 2 => whole.len() / 2,
            3 | 4 => {
                self.keeps = true;
                return Err(ERRNOS[usize::from(choice / 8 % 8)]);
            }
            _ => whole.len(),
        };
        for first in &whole[..some] {
            let end = self.mapped.remove(first).expect("it is there");
            bytes = bytes.saturating_add(end - first).saturating_add(1);
        }
        Ok(match choice % 8 {
            5 => bytes.saturating_mul(2),
            6 => u64::MAX,
            _ => bytes,
        })
    }

    fn bits(&mut self, size: u64, Bitmap { page, words }: Bitmap<'_>) -> KernelResult<()> {
        let choice = self.choice();
        assert!(page.is_power_of_two() && words.iter().all(|&word| word == 0));
        assert!(u128::from(size / page) <= words.len() as u128 * 64);
        words.fill(if choice & 1 != 0 { u64::MAX } else { u64::from(choice) << 56 });
        if choice & 2 != 0 { Err(ERRNOS[usize::from(choice / 4 % 8)]) } else { Ok(()) }
    }
}

impl Type1Kernel for Hostile {
    fn info(&self) -> KernelResult<Type1Info> {
        Ok(self.0.lock().info.clone())
    }
    fn has(&self, extension: Extension) -> bool {
        extension == Extension::UnmapAll && self.0.lock().unmap_all
    }
    unsafe fn map(&self, _: MapFlags, iova: u64, vaddr: u64, size: u64) -> KernelResult<()> {
        self.0.lock().map(iova, vaddr, size)
    }
    fn unmap(
        &self,
        flags: UnmapFlags,
        iova: u64,
        size: u64,
        dirty: Option<Bitmap<'_>>,
    ) -> KernelResult<u64> {
        let mut state = self.0.lock();
        if let Some(dirty) = dirty {
            assert_eq!(flags, UnmapFlags::GET_DIRTY);
            // Of a repeated unmap the bits are there already.
            dirty.words.fill(0);
            let _ = state.bits(size, dirty);
        }
        if flags.contains(UnmapFlags::ALL) {
            return state.unmap(0, u64::MAX);
        }
        state.unmap(iova, iova.checked_add(size - 1).expect("no range wraps"))
    }
    fn track_dirty(&self, _: bool) -> KernelResult<()> {
        Ok(())
    }
    fn dirty(&self, _: u64, size: u64, dirty: Bitmap<'_>) -> KernelResult<()> {
        self.0.lock().bits(size, dirty)
    }
}

impl IommufdKernel for Hostile {
    fn new_ioas(&self) -> KernelResult<Id> {
        Ok(Id::new(1))
    }
    fn destroy(&self, _: Id) -> KernelResult<()> {
        Ok(())
    }
    fn iova_ranges(&self, _: Id) -> KernelResult<IovaRanges> {
        let info = &self.0.lock().info;
        let ranges = info.ranges.clone().unwrap_or_else(|| vec![Range::ALL]);
        Ok(IovaRanges { ranges, alignment: lowest(info.page_sizes) })
    }
    unsafe fn map(
        &self,
        _: Id,
        _: MapFlags,
        iova: Option<u64>,
        vaddr: u64,
        size: u64,
    ) -> KernelResult<u64> {
        let iova = iova.expect("a domain chooses");
        self.0.lock().map(iova, vaddr, size).map(|()| iova)
    }
    fn unmap(&self, _: Id, iova: u64, size: u64) -> KernelResult<u64> {
        let last = if size == u64::MAX { size } else { iova + (size - 1) };
        self.0.lock().unmap(iova, last)
    }
    fn new_hwpt(&self, _: Id, _: Id, _: bool) -> KernelResult<Id> {
        Err(Errno::OPNOTSUPP)
    }
    fn track_dirty(&self, _: Id, _: bool) -> KernelResult<()> {
        Err(Errno::OPNOTSUPP)
    }
    fn dirty(&self, _: Id, _: u64, _: u64, _: Bitmap<'_>) -> KernelResult<()> {
        Err(Errno::OPNOTSUPP)
    }
}

// Input: a byte of flags, the length of a reply, the number of choices; the reply; the choices; steps of five
// bytes.
fuzz_target!(|data: &[u8]| {
    let Some((&[flags, reply, choices], rest)) = data.split_first_chunk() else { return };
    let (reply, rest) = rest.split_at(usize::from(reply).min(rest.len()));
    let (choices, steps) = rest.split_at(usize::from(choices).min(rest.len()));
    let mut info = kernel::parse(reply);
    check_info(&info, reply.len());
    if flags & 1 != 0 {
        // A sane one, so that what follows is reached more often.
        info = Type1Info { page_sizes: 0x4020_1000, ..info };
        info.ranges = info.ranges.filter(|ranges| !ranges.is_empty());
    }
    let choices = choices.iter().rev().copied().collect();
    let state = State {
        info,
        choices,
        mapped: BTreeMap::new(),
        calls: 0,
        keeps: false,
        honest: true,
        unmap_all: flags & 2 != 0,
    };
    let kernel = Hostile(Arc::new(Mutex::new(state)));
    let tuning = Tuning { merge: false, chunk: 1 << (12 + flags / 16) };
    if flags & 4 != 0 {
        kernel.0.lock().info.dirty = None;
        // An alignment must be a power of two.
        if let Ok(domain) = Iommufd::new(kernel.clone(), tuning) {
            run(&kernel, &domain, &|| domain.unmap_all(), &|_, _| None, steps);
        }
    } else if let Ok(domain) = Type1::new(kernel.clone(), tuning) {
        let dirty = |range, unmap: bool| Some(read(&domain, range, unmap));
        run(&kernel, &domain, &|| domain.unmap_all(), &dirty, steps);
        drop(domain);
    }
    let state = kernel.0.lock();
    assert!(!state.honest || state.mapped.is_empty(), "a domain goes with what it has mapped");
});

fn check_info(info: &Type1Info, len: usize) {
    if let Some(ranges) = &info.ranges {
        assert!(ranges.is_sorted() && ranges.len() <= len / 16);
    }
    // A chain may begin at any byte but the first, in the structure before it too.
    assert!(info.dirty.is_none() || len > 24);
    assert!(info.available.is_none() || len > 12);
}

/// Reads dirty bits; none lie outside of the range.
fn read(domain: &Type1<Hostile>, range: Range, unmap: bool) -> Result<u128, Error> {
    let granule = domain.geometry().page_sizes.granule();
    let Some(mut map) = DirtyMap::new(range, granule) else { return Ok(0) };
    let result = match unmap {
        true => domain.unmap_dirty(range, &mut map),
        false => domain.read_dirty(range, &mut map).map(|()| 0),
    };
    assert!(map.count() <= map.pages() && map.iter().all(|iova| range.contains(iova)));
    result
}

type Dirty<'d> = dyn Fn(Range, bool) -> Option<Result<u128, Error>> + 'd;

fn run(
    kernel: &Hostile,
    domain: &dyn Domain<Target = HostAddr>,
    unmap_all: &dyn Fn() -> Result<u128, Error>,
    dirty: &Dirty<'_>,
    steps: &[u8],
) {
    let geometry = domain.geometry();
    let granule = geometry.page_sizes.granule();
    let (low, high) = (geometry.aperture.first().0, geometry.aperture.last().0);
    let mut held = Vec::<(Range, u64)>::new();
    for &[what, from, at, count, to] in steps.as_chunks().0.iter().take(200) {
        // From the ends of what can be mapped, or anywhere.
        let away = u64::from(at).wrapping_mul(granule);
        let first = match from % 4 {
            0 => low.wrapping_add(away),
            1 => (high.wrapping_sub(away) / granule).wrapping_mul(granule),
            2 => away,
            _ => u64::from(at) << (from / 4),
        };
        let len = u64::from(count % 16).wrapping_mul(granule);
        let Some(range) = Range::from_len(Iova(first), len) else { continue };
        let overlaps = held.iter().any(|it| it.0.overlaps(range));
        let splits = held.iter().any(|it| it.0.overlaps(range) && !range.covers(it.0));
        let covered: Vec<_> = held.iter().copied().filter(|it| range.covers(it.0)).collect();
        let bytes: u128 = covered.iter().map(|it| it.0.len()).sum();
        match what % 8 {
            0..=3 => {
                let target = u64::from(to).wrapping_mul(granule);
                // SAFETY: nothing accesses the memory: the kernel only records requests.
                let map = unsafe { Map::of(range, HostAddr(target), Prot::RW) };
                if domain.map(map).is_ok() {
                    assert!(!overlaps && geometry.is_mappable(range.first()));
                    held.push((range, target));
                }
            }
            4 | 5 => {
                let result = match what / 8 % 2 {
                    1 if range.extent() / granule < MOST_BITS => dirty(range, true),
                    _ => None,
                };
                let with_bits = result.is_some();
                let result = result.unwrap_or_else(|| domain.unmap(range, &mut Gather::new()));
                match result {
                    Ok(gone) => {
                        // Or the kernel says that nothing was there, as of what it refuses.
                        if gone != bytes || splits {
                            assert!(with_bits && gone == 0, "{gone} bytes of {bytes}");
                            continue;
                        }
                        held.retain(|it| !range.covers(it.0));
                    }
                    // Some of it may be gone, of which the kernel has said so.
                    Err(_) => held.retain(|it| {
                        let stays = domain.iova_to_phys(it.0.first()).is_some();
                        assert!(stays || range.covers(it.0) && !splits);
                        stays
                    }),
                }
            }
            6 => {
                if let Some(Ok(gone)) = dirty(range, false) {
                    assert_eq!(gone, 0);
                }
            }
            _ => match unmap_all() {
                Ok(gone) => {
                    assert_eq!(gone, held.iter().map(|it| it.0.len()).sum());
                    held.clear();
                }
                Err(_) => held.retain(|it| domain.iova_to_phys(it.0.first()).is_some()),
            },
        }
        check(kernel, domain, &held);
    }
}

fn check(kernel: &Hostile, domain: &dyn Domain<Target = HostAddr>, held: &[(Range, u64)]) {
    for &(range, target) in held {
        for at in [range.first(), range.last()] {
            let there = HostAddr(target + (at.0 - range.first().0));
            assert_eq!(domain.iova_to_phys(at), Some(there));
        }
    }
    let state = kernel.0.lock();
    // An honest kernel holds exactly what the domain does.
    if state.honest {
        let bytes: u128 =
            state.mapped.iter().map(|(first, last)| u128::from(last - first) + 1).sum();
        assert_eq!(bytes, held.iter().map(|it| it.0.len()).sum());
    }
    // What is still mapped in the kernel while the domain has forgotten it was reported as gone.
    for (&first, &last) in &state.mapped {
        let range = Range::new(Iova(first), Iova(last)).expect("a range");
        let known = held.iter().any(|it| it.0.covers(range));
        assert!(known || !state.honest, "{range} is lost");
    }
}
