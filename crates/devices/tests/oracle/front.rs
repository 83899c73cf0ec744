//! The front end of a device IOTLB: it has the table, sends updates for misses, and invalidates what the driver
//! unmaps.

use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_iommu::{
    Domain, Error, Gather, Geometry, GuestPhys, Map, Partial, Range, Result, SoftDomain, SyncToken,
    Work, shootdown::Shootdown, table::Limits,
};
use ringfence_iotlb::{Iotlb, IotlbConfig, Miss, MissSink};

pub(crate) struct Front {
    /// The driver's mappings. No device reads it.
    table: Arc<SoftDomain<GuestPhys>>,
    iotlb: Arc<Iotlb>,
    /// Whether the device is attached. Held from a look-up to the update that it leads to, and while
    /// an invalidation begins: as messages that come in one order, an update that is older than an
    /// invalidation does not come after it.
    order: Mutex<bool>,
    /// The invalidations of each sync that is under way.
    syncs: Mutex<(u64, BTreeMap<u64, Vec<u64>>)>,
}

struct Sink(mpsc::Sender<Vec<Miss>>);

impl MissSink for Sink {
    fn send(&self, misses: &[Miss]) -> usize {
        self.0.send(misses.to_vec()).map_or(0, |()| misses.len())
    }
}

impl Front {
    /// A front end, and a thread that sends updates for the misses of its IOTLB until the [end](Self::end).
    pub(crate) fn start(
        geometry: Geometry,
        limits: Limits,
        shootdown: &Arc<Shootdown>,
        entries: u64,
    ) -> Arc<Front> {
        let again = Duration::from_millis(1);
        let config = IotlbConfig { entries, again, seed: Some(1), ..IotlbConfig::default() };
        let (post, misses) = mpsc::channel::<Vec<Miss>>();
        let iotlb = Iotlb::new(config, Arc::clone(shootdown));
        iotlb.set_miss_sink(Some(Arc::new(Sink(post))));
        let table = SoftDomain::new(geometry, limits, Shootdown::new(1));
        let (order, syncs) = (Mutex::new(false), Mutex::default());
        let front = Arc::new(Front { table, iotlb, order, syncs });
        let server = Arc::clone(&front);
        // Ends when the sink is gone.
        thread::spawn(move || misses.iter().flatten().for_each(|miss| server.serve(miss)));
        front
    }

    pub(crate) fn table(&self) -> &Arc<SoftDomain<GuestPhys>> {
        &self.table
    }

    pub(crate) fn iotlb(&self) -> &Arc<Iotlb> {
        &self.iotlb
    }

    pub(crate) fn end(&self) {
        self.iotlb.set_miss_sink(None);
    }

    /// Attaches the device, or detaches it: then what it holds is invalidated.
    pub(crate) fn attach(&self, attached: bool) {
        let mut order = self.order.lock();
        *order = attached;
        if !attached {
            let token = self.iotlb.forget().expect("a table that only removes");
            drop(order);
            self.iotlb.shootdown().wait(token);
        }
    }

    fn serve(&self, miss: Miss) {
        let attached = self.order.lock();
        let found = self.table.mapping(miss.iova).filter(|_| *attached);
        match found.filter(|mapping| mapping.prot.allows(miss.access)) {
            Some(mapping) => {
                let token =
                    self.iotlb.update(mapping.range, GuestPhys(mapping.target), mapping.prot);
                let token = token.expect("what is evicted makes room");
                drop(attached);
                self.iotlb.shootdown().wait(token);
            }
            None => {
                let range = Range::new(miss.iova, miss.iova).expect("one address");
                match miss.again {
                    Some(number) => self.iotlb.reply(miss.iova, miss.access, number, false),
                    None => self.iotlb.refuse(range, miss.access),
                }
            }
        }
    }
}

// SAFETY: what is unmapped leaves the table and then, invalidated, the device's IOTLB, before a sync
// is over.
unsafe impl Domain for Front {
    type Target = GuestPhys;

    ringfence_iommu::pass_on!(table: geometry, capabilities, iova_to_phys);

    fn map_pages(&self, maps: &[Map<GuestPhys>]) -> Result<(), Partial> {
        self.table.map_pages(maps)
    }

    fn unmap_pages(&self, ranges: &[Range], gather: &mut Gather) -> Result<u128, Partial> {
        self.table.unmap_pages(ranges, gather)
    }

    fn sync_begin(&self, work: Work<'_>) -> Result<SyncToken> {
        let all = [Range::ALL];
        let ranges = match work {
            Work::Map(_) => return Ok(SyncToken::DONE),
            Work::Unmap { ranges, .. } => ranges,
            Work::All => &all,
        };
        // For the pages of the table itself.
        self.table.sync_begin(work)?;
        let begun = {
            let _order = self.order.lock();
            ranges.iter().map(|&range| self.iotlb.invalidate(range)).collect::<Result<Vec<_>>>()?
        };
        let mut syncs = self.syncs.lock();
        syncs.0 += 1;
        let number = syncs.0;
        syncs.1.insert(number, begun);
        Ok(SyncToken::new(number))
    }

    fn sync_poll(&self, token: SyncToken, _: Work<'_>, _: &mut dyn FnMut(Range, Error)) -> bool {
        let mut syncs = self.syncs.lock();
        let Some(begun) = syncs.1.get(&token.as_u64()) else { return true };
        let over = begun.iter().all(|&token| self.iotlb.shootdown().is_over(token));
        if over {
            syncs.1.remove(&token.as_u64());
        }
        over
    }

    fn sync_wait(&self, token: SyncToken) {
        let begun = self.syncs.lock().1.get(&token.as_u64()).cloned();
        begun.into_iter().flatten().for_each(|token| self.iotlb.shootdown().wait(token));
    }
}
