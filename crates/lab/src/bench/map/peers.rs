//! A device of another design behind the same rings: B-trees behind one lock.

use std::{
    collections::BTreeMap,
    sync::{Arc, RwLock},
};

use anyhow::{Result, anyhow};
use ringfence_iommu::{PageSizes, Range};
use ringfence_mem::Physical;
use ringfence_virtio_iommu::wire::{
    Features, IommuConfig, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, Status, TAIL_LEN,
    UnmapRequest, emit_tail,
};
use ringfence_virtq::{Chain, device::Queue};

use super::rig::{Rig, Server, Serving};

/// A mapping by its first address: its last address, its target, and its permissions.
type Mappings = BTreeMap<u64, (u64, u64, MapFlags)>;

/// The domains, behind one reader-writer lock. An endpoint stays in the domain of its number.
#[derive(Default)]
struct State {
    domains: RwLock<BTreeMap<u32, Mappings>>,
    /// UNMAP looks at every mapping of the domain.
    scan: bool,
}

/// Of the lock.
const WHOLE: &str = "no request panics";

impl State {
    /// Carries out a request, with all checks that ours makes for MAP and UNMAP. There is nothing
    /// to invalidate, since nothing is cached: every access takes the locks.
    fn execute(&self, request: Request) -> Status {
        let granule = PageSizes::X86.granule();
        match request {
            Request::Attach { domain, .. } => {
                self.domains.write().expect(WHOLE).entry(domain).or_default();
                Status::Ok
            }
            Request::Map(MapRequest { domain, range, phys, flags }) => {
                if !range.is_aligned(granule) || phys & (granule - 1) != 0 {
                    return Status::Range;
                }
                let mut domains = self.domains.write().expect(WHOLE);
                let Some(mappings) = domains.get_mut(&domain) else { return Status::NoEnt };
                let (first, last) = (range.first().0, range.last().0);
                let below = mappings.range(..=last).next_back();
                if below.is_some_and(|(_, (end, ..))| *end >= first) {
                    return Status::Inval;
                }
                mappings.insert(first, (last, phys, flags));
                Status::Ok
            }
            Request::Unmap(UnmapRequest { domain, range }) => {
                let mut domains = self.domains.write().expect(WHOLE);
                let Some(mappings) = domains.get_mut(&domain) else { return Status::NoEnt };
                unmap(mappings, range, self.scan)
            }
            _ => Status::Unsupp,
        }
    }

    fn access(&self, domain: u32, iova: u64) -> Option<u64> {
        let domains = self.domains.read().expect(WHOLE);
        let (first, (last, phys, _)) = domains.get(&domain)?.range(..=iova).next_back()?;
        (iova <= *last).then(|| phys + (iova - first))
    }
}

/// All or nothing. `scan`: every mapping of the domain is looked at.
fn unmap(mappings: &mut Mappings, range: Range, scan: bool) -> Status {
    let (first, last) = (range.first().0, range.last().0);
    let from_below = mappings.range(..first).next_back();
    let out_above = mappings.range(..=last).next_back();
    if from_below.is_some_and(|(_, (end, ..))| *end >= first)
        || out_above.is_some_and(|(_, (end, ..))| *end > last)
    {
        return Status::Range;
    }
    if scan {
        mappings.retain(|at, _| !(first..=last).contains(at));
    } else {
        while let Some((&at, _)) = mappings.range(first..=last).next() {
            mappings.remove(&at);
        }
    }
    Status::Ok
}

/// A device behind one or more request queues.
pub(super) struct Machine(Arc<State>);

impl Machine {
    /// `scan`: UNMAP looks at every mapping of the domain.
    pub(super) fn new(scan: bool) -> Machine {
        Machine(Arc::new(State { scan, ..State::default() }))
    }

    /// A request queue of `size` descriptors, with endpoint `id` in its driver's domain.
    pub(super) fn rig(&self, size: u16, id: u32) -> Result<Rig<BTree>> {
        let config = IommuConfig {
            page_sizes: PageSizes::X86,
            input_range: Range::ALL,
            domain_range: (id, id),
            probe_size: 0,
            bypass: false,
        };
        let features = Features::MAP_UNMAP | Features::DOMAIN_RANGE;
        Rig::new(size, (config, features), id, |queue, memory| BTree {
            queue,
            bus: Physical::new(memory),
            chain: Chain::new(),
            state: Arc::clone(&self.0),
            domain: id,
            refused: 0,
        })
    }
}

/// The device's end of one request queue.
pub(super) struct BTree {
    queue: Queue,
    bus: Physical,
    chain: Chain,
    state: Arc<State>,
    /// The domain and the endpoint in it.
    domain: u32,
    refused: u64,
}

impl Server for BTree {
    type Serving<'s> = &'s mut BTree;

    fn begin(&mut self) -> Result<&mut BTree> {
        Ok(self)
    }

    fn counts(&self) -> (u64, u64) {
        let domains = self.state.domains.read().expect(WHOLE);
        (domains.get(&self.domain).map_or(0, |mappings| mappings.len() as u64), self.refused)
    }
}

impl Serving for &mut BTree {
    #[inline]
    fn serve(&mut self) -> Result<bool> {
        let mut any = false;
        while self.queue.pop(&self.bus, &mut self.chain)? {
            let mut bytes = [0; MAX_REQUEST_LEN];
            let reach = |error| anyhow!("a request cannot be reached: {error}");
            let len = self.chain.read_at(&self.bus, 0, &mut bytes).map_err(reach)?;
            let status = match Request::parse(&bytes[..len]) {
                Ok(request) => self.state.execute(request),
                Err(error) => error.status().unwrap_or(Status::Unsupp),
            };
            self.refused += u64::from(status != Status::Ok);
            self.chain.write_at(&self.bus, 0, &emit_tail(status)).map_err(reach)?;
            self.queue.push_used(self.chain.head(), TAIL_LEN as u32);
            any = true;
        }
        if any {
            let _ = self.queue.publish_used();
        }
        Ok(any)
    }

    fn access(&mut self, iova: u64) -> Option<u64> {
        self.state.access(self.domain, iova)
    }
}
