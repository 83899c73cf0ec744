//! The device over domains whose invalidations fail.

use std::sync::Arc;

use parking_lot::Mutex;
use ringfence_iommu::{
    Error, Geometry, GuestPhys, Iova, PageSizes, Range, Result, SoftDomain, SyncToken,
    shootdown::{Invalidation, Reader, Shootdown},
    table::Limits,
    wrap::{Faulty, Kind, Stage, When},
};
use ringfence_virtio_iommu::{
    device::{Backing, Binding, Device, EndpointInfo, Options, Session},
    wire::{AttachFlags, MAX_REQUEST_LEN, MapFlags, Request, Status, TAIL_LEN, parse_tail},
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
    fn set_domain(&self, _: u32, _: Binding<Failing>) -> Result<()> {
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
    device: Device<Arc<One>>,
    session: Session<Arc<One>>,
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
        let options = Options::default();
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
    for (kind, failing) in [(Kind::SyncBegin, false), (Kind::SyncPoll, true)] {
        let mut rig = Rig::new();
        assert_eq!((rig.begin(attach()), rig.poll()), (Status::Ok, Ok(true)));
        let flags = MapFlags::READ;
        let map = Request::Map { domain: 1, range: page(), phys: 0, flags };
        assert_eq!((rig.begin(map), rig.poll()), (Status::Ok, Ok(true)));
        let unmap = Request::Unmap { domain: 1, range: page() };
        rig.backing.domain.inject(kind, When::Nth(1), Stage::Before);
        rig.begin(unmap);
        assert!(rig.poll().is_err(), "{kind:?}");
        if failing {
            // It was begun, and what came of it nobody knows.
            rig.reader.poll(|_| ());
        }
        assert_eq!(rig.begin(unmap), Status::Ok);
        assert_eq!(rig.poll(), Ok(false), "{kind:?}: the reader knows nothing of it yet");
        let mut heard = Vec::new();
        rig.reader.poll(|gone| heard.push(gone));
        assert_eq!(heard, [Invalidation::Range(page())]);
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
