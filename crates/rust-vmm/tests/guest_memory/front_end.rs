//! The base of the tests: an IOTLB over two regions of memory, and a front end that serves misses.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, Miss, MissSink};
use ringfence_rust_vmm::{FailureScope, IotlbAddressSpace};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

pub(crate) const PAGE: u64 = 4096;
/// Two adjacent regions, and a separate one.
pub(crate) const REGIONS: [(u64, u64); 3] =
    [(0x10_0000, 0x8000), (0x10_8000, 0x8000), (0x20_0000, 0x1_0000)];

pub(crate) type Plain = Arc<GuestMemoryMmap>;
pub(crate) type Space = IotlbAddressSpace<Plain>;

pub(crate) struct Bench {
    pub(crate) shootdown: Arc<Shootdown>,
    pub(crate) iotlb: Arc<Iotlb>,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) memory: Plain,
}

/// Memory in which every 8 bytes hold their guest-physical address.
pub(crate) fn memory() -> Plain {
    let ranges = REGIONS.map(|(first, len)| (GuestAddress(first), len as usize));
    let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
    for (first, len) in REGIONS {
        for gpa in (first..first + len).step_by(8) {
            memory.write_obj(gpa, GuestAddress(gpa)).unwrap();
        }
    }
    Arc::new(memory)
}

pub(crate) fn bench_with(config: IotlbConfig) -> Bench {
    let shootdown = Shootdown::new(8);
    let iotlb = Iotlb::new(config, Arc::clone(&shootdown));
    let binding = Binding::Iotlb(Arc::clone(&iotlb));
    let endpoint = Endpoint::new(1, Arc::clone(&shootdown), binding);
    Bench { shootdown, iotlb, endpoint, memory: memory() }
}

pub(crate) fn bench() -> Bench {
    // Longer than any test takes, unless the time-out is what is tested.
    bench_with(IotlbConfig { timeout: Duration::from_secs(60), ..IotlbConfig::default() })
}

pub(crate) fn short_timeout() -> Bench {
    bench_with(IotlbConfig { timeout: Duration::from_millis(30), ..IotlbConfig::default() })
}

pub(crate) fn range(first: u64, len: u64) -> Range {
    Range::from_len(Iova(first), len).unwrap()
}

impl Bench {
    pub(crate) fn space(&self) -> Space {
        self.space_that(FailureScope::Guard)
    }

    pub(crate) fn space_that(&self, scope: FailureScope) -> Space {
        let (endpoint, memory) = (Arc::clone(&self.endpoint), Arc::clone(&self.memory));
        IotlbAddressSpace::with_scope(endpoint, memory, scope).unwrap()
    }

    pub(crate) fn map(&self, iova: u64, gpa: u64, len: u64) {
        self.map_for(iova, gpa, len, Prot::RW);
    }

    pub(crate) fn map_for(&self, iova: u64, gpa: u64, len: u64, prot: Prot) {
        let token = self.iotlb.update(range(iova, len), GuestPhys(gpa), prot).unwrap();
        self.shootdown.wait(token);
    }

    /// Begins an invalidation; returns its token.
    pub(crate) fn unmap(&self, iova: u64, len: u64) -> u64 {
        self.iotlb.invalidate(range(iova, len)).unwrap()
    }

    /// A front end that hands each batch of misses to `front_end`, on a thread of its own, until
    /// `job` is done.
    pub(crate) fn with_front_end<R>(
        &self,
        mut front_end: impl FnMut(&Bench, Vec<Miss>) + Send,
        job: impl FnOnce() -> R,
    ) -> R {
        let (to, from) = mpsc::channel();
        thread::scope(|scope| {
            self.iotlb.set_miss_sink(Some(Arc::new(MissQueue(to))));
            scope.spawn(move || {
                while let Ok(misses) = from.recv() {
                    front_end(self, misses);
                }
            });
            let hang_up = HangUp(&self.iotlb);
            let result = job();
            drop(hang_up);
            result
        })
    }
}

/// Ends the front end's thread, even if the test fails.
struct HangUp<'a>(&'a Iotlb);

impl Drop for HangUp<'_> {
    fn drop(&mut self) {
        self.0.set_miss_sink(None);
    }
}

struct MissQueue(mpsc::Sender<Vec<Miss>>);

impl MissSink for MissQueue {
    fn send(&self, misses: &[Miss]) -> usize {
        self.0.send(misses.to_vec()).map_or(0, |()| misses.len())
    }
}

pub(crate) fn page_of(miss: &Miss) -> u64 {
    miss.iova.0 & !(PAGE - 1)
}

/// A bench whose misses go nowhere until they are [served](Bench::with_front_end).
pub(crate) fn ignore_misses(bench: &Bench) {
    struct NoUpdate;
    impl MissSink for NoUpdate {
        fn send(&self, misses: &[Miss]) -> usize {
            misses.len()
        }
    }
    bench.iotlb.set_miss_sink(Some(Arc::new(NoUpdate)));
}
