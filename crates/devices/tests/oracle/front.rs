//! The front end of a device IOTLB: it has the table, sends updates for misses, and invalidates what the driver
//! unmaps. The IOTLB is in this process, or in a back end that gets messages.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use ringfence_iommu::{
    Domain, Error, Gather, Geometry, GuestPhys, Iova, Map, Partial, Prot, Range, Result,
    SoftDomain, SyncToken, Work,
    shootdown::Shootdown,
    table::{Limits, Mapping},
};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, Miss, MissSink, prot_of};
use ringfence_mem::{Access, GuestRam};
use ringfence_run::worker::Worker;
use ringfence_vhost_user::{BackendMessage, Frontend, Iotlb as Message, IotlbHandle};

use crate::{
    messages::{self, Served},
    probe::Probe,
    rig::{LONG, Setup},
    serving::Serving,
};

pub(crate) struct Front {
    /// The driver's mappings. No device reads it.
    table: Arc<SoftDomain<GuestPhys>>,
    to: To,
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

/// Where the IOTLB is.
enum To {
    Here(Arc<Iotlb>),
    /// In a back end, which has this memory.
    BackEnd {
        messages: IotlbHandle,
        /// The last update that permits nothing.
        refused: AtomicU64,
        ram: Arc<GuestRam>,
        /// Until the end.
        connection: Mutex<Option<(Frontend, Serving)>>,
    },
}

impl To {
    /// Begins to invalidate a range; the token for the end of that.
    fn invalidate(&self, range: Range) -> Result<u64> {
        match self {
            To::Here(iotlb) => iotlb.invalidate(range),
            To::BackEnd { messages, .. } => {
                let (first, last) = (range.first().0, range.last().0);
                // A connection that has ended reaches nothing.
                Ok(messages.post(&[Message::Invalidate { first, last }]).unwrap_or(0))
            }
        }
    }

    /// Sends an update.
    fn update(&self, Mapping { range, target, prot }: Mapping) -> u64 {
        match self {
            To::Here(iotlb) => {
                let token = iotlb.update(range, GuestPhys(target), prot);
                token.expect("what is evicted makes room")
            }
            To::BackEnd { ram, .. } => self.post(range, target - ram.gpa(), access_of(prot)),
        }
    }

    /// Nothing is mapped at `iova`: a message to a back end says so.
    fn refuse(&self, iova: Iova) -> Option<u64> {
        let To::BackEnd { refused, .. } = self else { return None };
        let token = self.post(Range::new(iova, iova).expect("one address"), 0, None);
        refused.store(token, Ordering::SeqCst);
        Some(token)
    }

    /// The token for the end of what was refused: what is mapped then is not taken to be refused.
    fn refused(&self) -> Option<u64> {
        match self {
            To::Here(_) => None,
            To::BackEnd { refused, .. } => Some(refused.load(Ordering::SeqCst)),
        }
    }

    fn post(&self, range: Range, offset: u64, access: Option<Access>) -> u64 {
        let To::BackEnd { messages, ram, .. } = self else { unreachable!("it has no messages") };
        let (first, last) = (range.first().0, range.last().0);
        let user_addr = ram.user_addr() + offset;
        messages.post(&[Message::Update { first, last, user_addr, access }]).unwrap_or(0)
    }

    fn is_over(&self, token: u64) -> bool {
        match self {
            To::Here(iotlb) => iotlb.shootdown().is_over(token),
            To::BackEnd { messages, .. } => messages.flush().is_err() || messages.is_done(token),
        }
    }

    fn wait(&self, token: u64) {
        match self {
            To::Here(iotlb) => iotlb.shootdown().wait(token),
            // (Another request reports an update that was refused.)
            To::BackEnd { messages, .. } => drop(messages.settle()),
        }
    }
}

fn access_of(prot: Prot) -> Option<Access> {
    match (prot.contains(Prot::READ), prot.contains(Prot::WRITE)) {
        (true, true) => Some(Access::ReadWrite),
        (true, false) => Some(Access::Read),
        (false, true) => Some(Access::Write),
        (false, false) => None,
    }
}

/// How an IOTLB of so many entries is set up, which sends a miss again after so many milliseconds. (A front
/// end that gets no CPU for long refuses nothing.)
fn config(entries: u64, ms: u64) -> IotlbConfig {
    let again = Duration::from_millis(ms);
    IotlbConfig { entries, again, timeout: LONG, seed: Some(1), ..IotlbConfig::default() }
}

impl Front {
    /// A front end, and a thread that sends updates for the misses of its IOTLB until the [end](Self::end).
    pub(crate) fn start(
        geometry: Geometry,
        limits: Limits,
        shootdown: &Arc<Shootdown>,
        entries: u64,
    ) -> (Arc<Front>, Binding) {
        let (post, misses) = mpsc::channel::<Vec<Miss>>();
        let iotlb = Iotlb::new(config(entries, 1), Arc::clone(shootdown));
        iotlb.set_miss_sink(Some(Arc::new(Sink(post))));
        let front = Front::new(geometry, limits, To::Here(Arc::clone(&iotlb)));
        let (server, of) = (Arc::clone(&front), Arc::clone(&iotlb));
        // Ends when the sink is gone.
        thread::spawn(move || {
            for miss in misses.iter().flatten() {
                let range = Range::new(miss.iova, miss.iova).expect("one address");
                match (server.serve(miss.iova, miss.access, true), miss.again) {
                    (true, _) => {}
                    (false, Some(number)) => of.reply(miss.iova, miss.access, number, false),
                    (false, None) => of.refuse(range, miss.access),
                }
            }
        });
        (front, Binding::Iotlb(iotlb))
    }

    /// The front end of the probes on these workers, and the probes.
    pub(crate) fn connect(
        (geometry, limits): (Geometry, Limits),
        setup: &Setup,
        workers: &Arc<[Worker]>,
        unit: u32,
        ram: &Arc<GuestRam>,
    ) -> (Arc<Front>, Vec<Probe>, Arc<Endpoint>) {
        // Longer than the messages take, as a rule, on a busy machine.
        let config = config(setup.entries, 5);
        let served = messages::connect(workers, unit, config, ram, setup.lie);
        let Served { frontend, mut misses, serving, probes, endpoint } = served;
        let (messages, ram) = (frontend.iotlb_handle(), Arc::clone(ram));
        let connection = Mutex::new(Some((frontend, serving)));
        let refused = AtomicU64::new(0);
        let to = To::BackEnd { messages, refused, ram, connection };
        let front = Front::new(geometry, limits, to);
        let server = Arc::clone(&front);
        // Ends when the back end hangs up.
        thread::spawn(move || {
            let mut requests = Vec::new();
            while let Ok(true) = misses.recv_all(None, &mut requests) {
                // One that was sent again meanwhile needs no second update.
                let mut served = BTreeMap::new();
                for request in requests.drain(..) {
                    let BackendMessage::Iotlb(Message::Miss { iova, access }) = request.message
                    else {
                        continue;
                    };
                    let access = prot_of(access);
                    let done = *served
                        .entry((iova, access.bits()))
                        .or_insert_with(|| server.serve(Iova(iova), access, request.need_reply));
                    // The connection may have ended.
                    let _ = misses.reply(&request, done);
                }
            }
        });
        (front, probes, endpoint)
    }

    fn new(geometry: Geometry, limits: Limits, to: To) -> Arc<Front> {
        let table = SoftDomain::new(geometry, limits, Shootdown::new(1));
        let (order, syncs) = (Mutex::new(false), Mutex::default());
        Arc::new(Front { table, to, order, syncs })
    }

    pub(crate) fn table(&self) -> &Arc<SoftDomain<GuestPhys>> {
        &self.table
    }

    pub(crate) fn end(&self) {
        match &self.to {
            To::Here(iotlb) => iotlb.set_miss_sink(None),
            To::BackEnd { connection, .. } => drop(connection.lock().take()),
        }
    }

    /// Attaches the device, or detaches it: then what it holds is invalidated.
    pub(crate) fn attach(&self, attached: bool) {
        let mut order = self.order.lock();
        *order = attached;
        if !attached {
            let token = self.to.invalidate(Range::ALL).expect("a table that only removes");
            drop(order);
            self.to.wait(token);
        } else if let Some(token) = self.to.refused() {
            drop(order);
            self.to.wait(token);
        }
    }

    /// Sends the update for a miss; false if the access is not allowed. What is not mapped is refused at
    /// once unless there will be a reply.
    fn serve(&self, iova: Iova, access: Prot, replies: bool) -> bool {
        let attached = self.order.lock();
        let found = self.table.mapping(iova).filter(|_| *attached);
        let token = match found {
            Some(found) if found.prot.allows(access) => Some(self.to.update(found)),
            // For another access it is allowed: only a reply refuses this one alone.
            Some(_) => None,
            None if !replies => self.to.refuse(iova),
            None => None,
        };
        drop(attached);
        // No reply overtakes a message that refuses.
        match (&self.to, token) {
            (To::BackEnd { messages, .. }, _) if found.is_some() => drop(messages.flush()),
            (to, token) => token.into_iter().for_each(|token| to.wait(token)),
        }
        found.is_some_and(|found| found.prot.allows(access))
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
            Work::Map(_) => &[],
            Work::Unmap { ranges, .. } => ranges,
            Work::All => &all[..],
        };
        // For the pages of the table itself.
        self.table.sync_begin(work)?;
        let begun = {
            let _order = self.order.lock();
            let begun = ranges.iter().map(|&range| self.to.invalidate(range));
            begun.chain(self.to.refused().map(Ok)).collect::<Result<Vec<_>>>()?
        };
        if begun.iter().all(|&token| self.to.is_over(token)) {
            return Ok(SyncToken::DONE);
        }
        let mut syncs = self.syncs.lock();
        syncs.0 += 1;
        let number = syncs.0;
        syncs.1.insert(number, begun);
        Ok(SyncToken::new(number))
    }

    fn sync_poll(&self, token: SyncToken, _: Work<'_>, _: &mut dyn FnMut(Range, Error)) -> bool {
        let mut syncs = self.syncs.lock();
        let Some(begun) = syncs.1.get(&token.as_u64()) else { return true };
        let over = begun.iter().all(|&token| self.to.is_over(token));
        if over {
            syncs.1.remove(&token.as_u64());
        }
        over
    }

    fn sync_wait(&self, token: SyncToken) {
        let begun = self.syncs.lock().1.get(&token.as_u64()).cloned();
        begun.into_iter().flatten().for_each(|token| self.to.wait(token));
    }
}
