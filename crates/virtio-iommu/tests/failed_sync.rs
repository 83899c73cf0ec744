//! The device over domains with failing invalidations.

use std::sync::Arc;

use parking_lot::Mutex;
use ringfence_iommu::{
    Domain, Error, Geometry, GuestPhys, Iova, PageSizes, Range, Result, SoftDomain, SyncToken,
    shootdown::{Reader, Shootdown},
    table::Limits,
};
use ringfence_iommu_testing::{Faulty, Kind, Stage, When};
use ringfence_mem::{SharedFile, Translate};
use ringfence_virtio_iommu::{
    device::{
        Backing, Binding, Device, DeviceConfig, EndpointInfo, Journal, RequestQueue, Session,
    },
    wire::{
        AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, Status, TAIL_LEN,
        UnmapRequest, parse_tail,
    },
};
use ringfence_virtq::{
    Desc,
    testing::{Ram, pair},
};

type Failing = Faulty<Arc<SoftDomain<GuestPhys>>>;

/// Endpoint 1, its one domain, and the change of its binding that is to be invalidated.
struct One {
    domain: Arc<Failing>,
    /// How often an invalidation of the binding was begun; it fails as long as it is to.
    rebound: Mutex<(u64, bool)>,
}

impl Backing for One {
    type Domain = Failing;

    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        (id == 1).then(EndpointInfo::default)
    }
    fn endpoints(&self) -> Vec<u32> {
        vec![1]
    }
    fn create_domain(&self) -> Result<Arc<Failing>> {
        Ok(Arc::clone(&self.domain))
    }
    fn set_domain(&self, _: u32, _: Binding<Arc<Failing>>) -> Result<()> {
        Ok(())
    }
    fn sync_binding_begin(&self, _: u32) -> Result<SyncToken> {
        let (begun, fails) = &mut *self.rebound.lock();
        *begun += 1;
        if *fails { Err(Error::Gone("a test")) } else { Ok(SyncToken::DONE) }
    }
}

struct Rig {
    backing: Arc<One>,
    device: Device<One>,
    session: Session<One>,
    reader: Reader,
}

fn page() -> Range {
    Range::from_len(Iova(0x1000), 0x1000).unwrap()
}

impl Rig {
    fn new() -> Rig {
        let shootdown = Shootdown::new(1);
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let soft = SoftDomain::new(geometry, Limits::NONE, Arc::clone(&shootdown));
        let domain = Arc::new(Faulty::new(soft, 0));
        let reader = shootdown.reader().unwrap();
        let backing = Arc::new(One { domain, rebound: Mutex::default() });
        let options = DeviceConfig::default();
        let features = options.features.bits();
        let device = Device::new(Arc::clone(&backing), options);
        device.set_features(features);
        Rig { backing, device, session: Session::new(), reader }
    }

    /// Carries a request out and begins its sync.
    fn begin(&mut self, request: Request) -> Status {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        let mut reply = [0; TAIL_LEN];
        self.device.handle(&mut self.session, &bytes[..len], &mut reply);
        self.device.begin_sync(&mut self.session);
        parse_tail(reply).expect("a status")
    }

    fn poll(&mut self) -> Result<bool> {
        self.device.poll_sync(&mut self.session)
    }
}

fn attach() -> Request {
    Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() }
}

#[test]
fn an_unmap_that_is_sent_again_waits_for_the_invalidation_that_failed() {
    // rule V20
    for (kind, failing) in [(Kind::Sync, false), (Kind::SyncEnd, true)] {
        let mut rig = Rig::new();
        assert_eq!((rig.begin(attach()), rig.poll()), (Status::Ok, Ok(true)));
        let flags = MapFlags::READ;
        let map = Request::Map(MapRequest { domain: 1, range: page(), phys: 0, flags });
        assert_eq!((rig.begin(map), rig.poll()), (Status::Ok, Ok(true)));
        let unmap = Request::Unmap(UnmapRequest { domain: 1, range: page() });
        rig.backing.domain.inject(kind, When::Nth(1), Stage::Before);
        rig.begin(unmap);
        if failing {
            // It was begun, and its result is unknown.
            assert_eq!(rig.poll(), Ok(false));
            rig.reader.poll(|_| ());
        }
        assert!(rig.poll().is_err(), "{kind:?}");
        assert_eq!(rig.begin(unmap), Status::Ok);
        assert_eq!(rig.poll(), Ok(false), "{kind:?}: the reader knows nothing of it yet");
        let mut invalidated = Vec::new();
        rig.reader.poll(|gone| invalidated.push(gone));
        assert_eq!(invalidated, [page()]);
        assert_eq!(rig.poll(), Ok(true));
        assert!(!rig.session.needs_sync());
    }
}

#[test]
fn an_attach_that_is_sent_again_waits_for_the_binding_that_could_not_be_invalidated() {
    // rule V11
    let mut rig = Rig::new();
    rig.backing.rebound.lock().1 = true;
    for begun in 1..3 {
        rig.begin(attach());
        assert!(rig.poll().is_err());
        assert_eq!(rig.backing.rebound.lock().0, begun);
    }
    rig.backing.rebound.lock().1 = false;
    assert_eq!((rig.begin(attach()), rig.poll()), (Status::Ok, Ok(true)));
    assert_eq!(rig.backing.rebound.lock().0, 3);
    assert!(!rig.session.needs_sync());
}

#[test]
fn a_process_after_the_one_whose_invalidation_failed_reports_that_it_did() {
    // rule V20
    const LEN: usize = 1 << 16;
    let (file, fd) = SharedFile::create(LEN).unwrap();
    let rig = Rig::new();
    rig.device.set_journal(Journal::new(file).unwrap(), |error| panic!("{error}")).unwrap();
    let flags = MapFlags::READ;
    let requests = [
        attach(),
        Request::Map(MapRequest { domain: 1, range: page(), phys: 0, flags }),
        Request::Unmap(UnmapRequest { domain: 1, range: page() }),
    ];
    // The same ring twice: as the first process leaves it, and as if it had died before it published.
    let [left, seen] = [(), ()].map(|()| {
        let ram = Ram::new(0, 0x4000);
        let (mut driver, queue) = pair(&ram, 0, 8, false);
        for (at, request) in (0x2000..).step_by(64).zip(&requests) {
            let mut bytes = [0; MAX_REQUEST_LEN];
            let len = request.emit(&mut bytes);
            ram.write(at, &bytes[..len]).unwrap();
            let descs = [Desc::readable(at, len as u32), Desc::writable(at + 60, 4)];
            driver.add(&descs, at).unwrap();
        }
        driver.publish();
        (ram, queue)
    });
    let statuses = |ram: &Ram| {
        [0x203c, 0x207c, 0x20bc].map(|at| {
            let mut tail = [0xee; TAIL_LEN];
            ram.read(at, &mut tail).unwrap();
            parse_tail(tail).unwrap()
        })
    };
    rig.backing.domain.inject(Kind::Sync, When::Nth(1), Stage::Before);
    let device = Arc::new(rig.device);
    let (ram, queue) = left;
    RequestQueue::new(device, queue).poll(&ram).unwrap();
    assert_eq!(statuses(&ram), [Status::DevErr, Status::Ok, Status::DevErr]);

    let (_, recovered) = Journal::open(SharedFile::map(fd, 0, LEN as u64).unwrap()).unwrap();
    assert_eq!(recovered.requests(), 3);
    let Rig { backing, device, reader, .. } = Rig::new();
    // No reader has anything cached.
    drop(reader);
    device.recover(&recovered).unwrap();
    let device = Arc::new(device);
    let (ram, queue) = seen;
    let completions = recovered.into_completions();
    let mut queue = RequestQueue::resume(Arc::clone(&device), queue, completions);
    assert_eq!(queue.poll(&ram).unwrap().published, 3);
    assert_eq!(statuses(&ram), [Status::DevErr, Status::Ok, Status::DevErr]);
    assert_eq!((device.domains(), backing.domain.iova_to_phys(Iova(0x1000))), (1, None));
}
