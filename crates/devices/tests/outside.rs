//! A virtio-iommu with endpoints that translate in this process, in a type1 container and in an
//! iommufd.

use std::sync::{Arc, OnceLock};

use ringfence_devices::iommu::Endpoints;
use ringfence_iommu::{
    Error, Geometry, GuestPhys, HostAddr, Iova, PageSizes, Range, ReservedKind, ReservedRegion,
    shootdown::Shootdown, table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_vfio::{Iommufd, Tuning, Type1, kernel::Id};
use ringfence_vfio_testing::fake::{self, FakeConfig, Group, Memory, Owner, Step};
use ringfence_virtio_iommu::{
    device::{Device, DeviceConfig, HostRegion, Mirror, Session},
    wire::{
        AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Properties, Request, Status, TAIL_LEN,
        UnmapRequest, parse_tail,
    },
};

const PAGE: u64 = 4096;
/// The endpoints: two of this process, one in a container, one in an iommufd.
const NEAR: u32 = 1;
const OTHER: u32 = 2;
const TYPE1: u32 = 11;
const IOMMUFD: u32 = 12;
/// Pages of each half of guest memory.
const HALF: u64 = 64;

/// Where the halves of guest memory lie in this process. Each page begins with its number.
fn halves() -> [u64; 2] {
    static HALVES: OnceLock<[u64; 2]> = OnceLock::new();
    *HALVES.get_or_init(|| {
        [0, HALF].map(|from| {
            let words = vec![0_u64; ((HALF + 1) * PAGE / 8) as usize].leak();
            let gap = (words.as_ptr().addr() as u64).next_multiple_of(PAGE)
                - words.as_ptr().addr() as u64;
            let words = &mut words[(gap / 8) as usize..];
            (0..HALF).for_each(|page| words[(page * PAGE / 8) as usize] = from + page);
            words.as_mut_ptr().expose_provenance() as u64
        })
    })
}

fn range(first: u64, pages: u64) -> Range {
    Range::from_len(Iova(first * PAGE), pages * PAGE).unwrap()
}

fn memory() -> [HostRegion; 2] {
    let [low, high] = halves();
    [(0, low), (HALF, high)].map(|(first, at)| HostRegion {
        guest: (GuestPhys(first * PAGE), GuestPhys((first + HALF) * PAGE - 1)),
        host: HostAddr(at),
    })
}

struct Rig {
    endpoints: Arc<Endpoints>,
    device: Device<Endpoints>,
    session: Session<Endpoints>,
    near: Vec<Arc<Endpoint>>,
    shootdown: Arc<Shootdown>,
    container: fake::Type1,
    iommufd: fake::Iommufd,
    bound: Id,
    owners: [Owner; 2],
    mirrors: [Arc<Mirror>; 2],
}

/// What each endpoint reaches, page by page, and what its owner is charged.
#[derive(Debug, PartialEq)]
struct Seen {
    pages: [Vec<Option<u64>>; 4],
    charged: [u64; 2],
}

impl Rig {
    /// Each owner may lock `pages`.
    fn new(pages: u64, tuning: Tuning) -> Rig {
        let owners = [Owner::new(pages), Owner::new(pages)];
        let config = FakeConfig {
            owner: owners[0].clone(),
            memory: Memory::process(),
            ..FakeConfig::default()
        };
        let container = fake::Type1::new(config);
        container.attach(&Group::default()).unwrap();
        let type1 = Type1::new(container.clone(), tuning).unwrap();
        let iommufd = fake::Iommufd::new(owners[1].clone(), Memory::process());
        let bound = iommufd.bind(&Group::default(), true);
        let space = Iommufd::new(iommufd.clone(), tuning).unwrap();
        iommufd.attach(bound, space.ioas()).unwrap();
        space.refresh().unwrap();

        let shootdown = Shootdown::new(1);
        let near = [NEAR, OTHER]
            .map(|id| Endpoint::new(id, Arc::clone(&shootdown), Binding::Blocked))
            .to_vec();
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let limits = Limits { mappings: 1000, table_bytes: 1 << 20 };
        let endpoints =
            Endpoints::new(near.iter().cloned(), Arc::clone(&shootdown), geometry, limits);
        let mirrors = [
            // SAFETY: `halves` stay mapped for ever, and are used as guest memory only.
            unsafe { Mirror::new(Arc::new(type1), memory(), true) },
            // SAFETY: as above.
            unsafe { Mirror::new(Arc::new(space), memory(), true) },
        ];
        for (id, mirror) in [TYPE1, IOMMUFD].into_iter().zip(&mirrors) {
            endpoints.add_outside(id, Arc::clone(mirror), &[]).unwrap();
        }
        let endpoints = Arc::new(endpoints);
        let options = DeviceConfig::default();
        let features = options.features.bits();
        let device = Device::new(Arc::clone(&endpoints), options);
        device.set_features(features);
        let session = Session::new();
        Rig {
            endpoints,
            device,
            session,
            near,
            shootdown,
            container,
            iommufd,
            bound,
            owners,
            mirrors,
        }
    }

    fn raw(&mut self, request: Request, room: usize) -> Vec<u8> {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        let mut reply = vec![0; room];
        let used = self.device.handle(&mut self.session, &bytes[..len], &mut reply);
        assert_eq!(used as usize, room);
        self.device.begin_sync(&mut self.session);
        assert_eq!(self.device.poll_sync(&mut self.session), Ok(true));
        reply
    }

    fn send(&mut self, request: Request) -> Status {
        let reply = self.raw(request, TAIL_LEN);
        parse_tail(reply.try_into().unwrap()).expect("a status")
    }

    fn attach(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Attach { domain, endpoint, flags: AttachFlags::empty() })
    }

    fn detach(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Detach { domain, endpoint })
    }

    fn map(&mut self, domain: u32, range: Range, page: u64) -> Status {
        let flags = MapFlags::READ | MapFlags::WRITE;
        self.send(Request::Map(MapRequest { domain, range, phys: page * PAGE, flags }))
    }

    fn unmap(&mut self, domain: u32, range: Range) -> Status {
        self.send(Request::Unmap(UnmapRequest { domain, range }))
    }

    /// Where an endpoint of this process gets at a page.
    fn near(&self, endpoint: u32, page: u64) -> Option<u64> {
        let at = Iova(page * PAGE);
        match self.near[endpoint as usize - 1].binding() {
            Binding::Blocked => None,
            Binding::Bypass => Some(at.0),
            Binding::Domain(domain) => {
                let reader = self.shootdown.reader().unwrap();
                domain.translate(&reader, at).map(|found| found.target(at))
            }
            Binding::Iotlb(_) => unreachable!("there is none"),
        }
    }

    /// Which page of the guest an endpoint behind an IOMMU reads at a page.
    fn far(&self, endpoint: u32, page: u64) -> Option<u64> {
        let mut number = [0; 8];
        let read = match endpoint {
            TYPE1 => self.container.dma_read(page * PAGE, &mut number),
            _ => self.iommufd.dma_read(self.bound, page * PAGE, &mut number),
        };
        read.ok().map(|()| u64::from_ne_bytes(number))
    }

    fn seen(&self) -> Seen {
        let near = [NEAR, OTHER].map(|id| (0..200).map(|page| self.near(id, page)).collect());
        let far = [TYPE1, IOMMUFD].map(|id| (0..200).map(|page| self.far(id, page)).collect());
        let ([near, other], [type1, iommufd]) = (near, far);
        let charged = [self.owners[0].used(), self.owners[1].used()];
        Seen { pages: [near, other, type1, iommufd], charged }
    }

    /// Checks that an endpoint behind a real IOMMU reaches what one of this process does in the
    /// same domain.
    fn assert_alike(&self, near: u32, far: u32) {
        for page in 0..200 {
            let expected = self.near(near, page).map(|phys| phys / PAGE);
            assert_eq!(self.far(far, page), expected, "page {page}");
        }
    }
}

fn tunings() -> [Tuning; 2] {
    [Tuning::default(), Tuning { merge: true, ..Tuning::default() }]
}

#[test]
fn all_members_of_a_domain_reach_the_same() {
    // rule V20
    for tuning in tunings() {
        let mut rig = Rig::new(1000, tuning);
        assert_eq!(rig.attach(1, NEAR), Status::Ok);
        for n in 0..20 {
            assert_eq!(rig.map(1, range(n, 1), n + 50), Status::Ok);
        }
        assert_eq!(rig.attach(1, TYPE1), Status::Ok);
        assert_eq!(rig.attach(1, IOMMUFD), Status::Ok);
        assert_eq!(rig.map(1, range(100, 8), HALF - 4), Status::Ok);
        // Adjacent, and still unmapped one by one.
        assert_eq!(rig.unmap(1, range(3, 1)), Status::Ok);
        assert_eq!(rig.unmap(1, range(5, 4)), Status::Ok);
        assert_eq!(rig.unmap(1, range(98, 4)), Status::Range);
        for far in [TYPE1, IOMMUFD] {
            rig.assert_alike(NEAR, far);
        }
        assert_eq!(rig.far(TYPE1, 104), Some(HALF));
        assert_eq!(rig.container.pinned(), 15 + 8);
        // rule V14
        assert_eq!(rig.detach(1, TYPE1), Status::Ok);
        assert_eq!((rig.container.pinned(), rig.container.mappings()), (0, 0));
        assert_eq!(rig.owners[0].used(), 0);
        rig.device.reset().unwrap();
        assert_eq!(rig.iommufd.pinned(), 0);
    }
}

#[test]
fn the_kernels_refusals_are_the_guests_and_change_nothing() {
    let mut refused = 0;
    for tuning in tunings() {
        for step in [Step::Record, Step::Pin, Step::Table, Step::Map] {
            for nth in 1..12 {
                let mut rig = Rig::new(1000, tuning);
                assert_eq!(rig.attach(1, NEAR), Status::Ok);
                assert_eq!(rig.attach(2, TYPE1), Status::Ok);
                assert_eq!(rig.map(1, range(0, 3), HALF - 2), Status::Ok);
                assert_eq!(rig.map(1, range(7, 1), 1), Status::Ok);
                assert_eq!(rig.map(2, range(9, 1), 2), Status::Ok);
                rig.container.fail(step, nth);
                rig.iommufd.fail(step, nth + 1);
                let requests: [&dyn Fn(&mut Rig) -> Status; 5] = [
                    &|rig| rig.attach(1, IOMMUFD),
                    &|rig| rig.attach(1, TYPE1),
                    &|rig| rig.map(1, range(20, 4), HALF - 1),
                    &|rig| rig.map(1, range(40, 1), 9),
                    &|rig| rig.map(1, range(50, 2), HALF - 1),
                ];
                for request in requests {
                    let before = rig.seen();
                    let status = request(&mut rig);
                    if status != Status::Ok {
                        refused += 1;
                        assert_eq!(rig.seen(), before, "{step:?} {nth}: {status:?}");
                    }
                }
                assert_eq!(rig.mirrors.each_ref().map(|mirror| mirror.failures()), [0, 0]);
                rig.container.heal();
                rig.iommufd.heal();
                for far in [TYPE1, IOMMUFD] {
                    assert_eq!(rig.attach(1, far), Status::Ok);
                    rig.assert_alike(NEAR, far);
                }
            }
        }
    }
    assert!(refused > 50, "only {refused} requests met a failure");
}

#[test]
fn an_endpoint_over_the_limit_of_locked_memory_cannot_join() {
    // rule V12
    let mut rig = Rig::new(10, Tuning::default());
    assert_eq!(rig.attach(1, NEAR), Status::Ok);
    assert_eq!(rig.map(1, range(0, 16), 0), Status::Ok);
    let before = rig.seen();
    assert_eq!(rig.attach(1, TYPE1), Status::NoMem);
    assert_eq!(rig.seen(), before);
    assert_eq!(rig.unmap(1, range(0, 16)), Status::Ok);
    assert_eq!(rig.attach(1, TYPE1), Status::Ok);
    assert_eq!(rig.map(1, range(0, 16), 0), Status::NoMem);
    assert_eq!(rig.near(NEAR, 0), None);
    assert_eq!(rig.map(1, range(0, 10), 0), Status::Ok);
    // All of guest memory is too much.
    let bypass = Request::Attach { domain: 2, endpoint: TYPE1, flags: AttachFlags::BYPASS };
    assert_eq!(rig.send(bypass), Status::NoMem);
    rig.assert_alike(NEAR, TYPE1);
    rig.owners[0].set_limit(1000);
    assert_eq!(rig.send(bypass), Status::Ok);
    assert_eq!(rig.far(TYPE1, HALF + 1), Some(HALF + 1));
}

fn reserved_regions(rig: &mut Rig, endpoint: u32) -> Vec<Range> {
    let reply = rig.raw(Request::Probe { endpoint }, 512 + TAIL_LEN);
    assert_eq!(reply[512], Status::Ok as u8);
    let regions = Properties::new(&reply[..512]).map(|ReservedRegion { range, kind }| {
        let window = Range::new(Iova(0xfee0_0000), Iova(0xfeef_ffff)).unwrap();
        assert_eq!(kind == ReservedKind::Msi, range == window);
        range
    });
    regions.collect()
}

#[test]
fn each_endpoint_reports_its_own_regions_and_a_domain_respects_all() {
    // rule V18
    // rule V27
    let mut rig = Rig::new(1000, Tuning::default());
    assert!(reserved_regions(&mut rig, NEAR).is_empty());
    // What a container cannot map: the window of its interrupts, and what lies above.
    let window = Range::new(Iova(0xfee0_0000), Iova(0xfeef_ffff)).unwrap();
    let above = Range::new(Iova(1 << 39), Iova(u64::MAX)).unwrap();
    assert_eq!(reserved_regions(&mut rig, TYPE1), [window, above]);
    let region = |range| ReservedRegion { range, kind: ReservedKind::Reserved };
    let new = Endpoint::new(5, Arc::clone(&rig.shootdown), Binding::Bypass);
    rig.endpoints.add(new, &[region(range(3, 2))]).unwrap();
    rig.device.endpoint_added(5).unwrap();
    assert_eq!(reserved_regions(&mut rig, 5), [range(3, 2)]);
    assert_eq!(rig.attach(1, NEAR), Status::Ok);
    assert_eq!(rig.map(1, range(4, 1), 0), Status::Ok);
    assert_eq!(rig.attach(1, 5), Status::Unsupp);
    assert_eq!(rig.unmap(1, range(4, 1)), Status::Ok);
    assert_eq!(rig.attach(1, 5), Status::Ok);
    assert_eq!(rig.attach(1, TYPE1), Status::Ok);
    assert_eq!(rig.map(1, range(4, 1), 0), Status::Inval);
    let at = Range::from_len(Iova(0xfee0_0000), PAGE).unwrap();
    assert_eq!(rig.map(1, at, 0), Status::Inval);
    assert_eq!(rig.detach(1, TYPE1), Status::Ok);
    assert_eq!(rig.map(1, at, 0), Status::Ok, "no endpoint that is left reserves it");
    assert_eq!(rig.attach(1, TYPE1), Status::Unsupp);
}

#[test]
fn endpoints_come_and_go() {
    // rule V14
    let mut rig = Rig::new(1000, Tuning::default());
    assert_eq!(rig.attach(1, NEAR), Status::Ok);
    assert_eq!(rig.attach(1, TYPE1), Status::Ok);
    assert_eq!(rig.attach(2, OTHER), Status::Ok);
    assert_eq!(rig.map(1, range(0, 4), 0), Status::Ok);
    assert_eq!(rig.map(2, range(0, 4), 8), Status::Ok);

    assert!(rig.endpoints.remove(OTHER) && !rig.endpoints.remove(OTHER));
    assert_eq!(rig.attach(2, OTHER), Status::NoEnt);
    assert_eq!(rig.detach(2, OTHER), Status::NoEnt);
    assert_eq!(rig.near(OTHER, 0), Some(8 * PAGE), "until the device removes it");
    rig.device.endpoint_removed(OTHER).unwrap();
    assert_eq!(rig.near(OTHER, 0), None);
    assert_eq!(rig.map(2, range(9, 1), 0), Status::NoEnt, "its domain has gone with it");
    assert_eq!(rig.endpoints.budget().table_bytes() / PAGE, 1);

    assert!(rig.endpoints.remove(TYPE1));
    rig.device.endpoint_removed(TYPE1).unwrap();
    assert_eq!(rig.container.pinned(), 0);
    assert_eq!(rig.map(1, range(9, 1), 0), Status::Ok, "one member is left");

    // The numbers are free again, and a new endpoint that has one begins like all.
    rig.device.write_config(36, &[1]).unwrap();
    let new = Endpoint::new(OTHER, Arc::clone(&rig.shootdown), Binding::Blocked);
    rig.near[1] = Arc::clone(&new);
    rig.endpoints.add(new, &[]).unwrap();
    let again = rig.endpoints.add_outside(NEAR, Arc::clone(&rig.mirrors[0]), &[]);
    assert!(matches!(again, Err(Error::Unsupported(_))));
    rig.endpoints.add_outside(TYPE1, Arc::clone(&rig.mirrors[0]), &[]).unwrap();
    for id in [OTHER, TYPE1] {
        rig.device.endpoint_added(id).unwrap();
    }
    // rule V5
    assert_eq!(rig.near(OTHER, 7), Some(7 * PAGE));
    assert_eq!(rig.far(TYPE1, 7), Some(7));
    assert_eq!(rig.attach(1, TYPE1), Status::Ok);
    rig.assert_alike(NEAR, TYPE1);
    assert!(rig.endpoints.is_settled());
}

#[test]
fn an_endpoint_that_may_not_bypass_never_does() {
    // rule V6
    let mut rig = Rig::new(1000, Tuning::default());
    for id in [NEAR, TYPE1] {
        assert!(rig.endpoints.forbid_bypass(id));
    }
    assert!(!rig.endpoints.forbid_bypass(99));
    rig.device.write_config(36, &[1]).unwrap();
    assert_eq!((rig.near(NEAR, 1), rig.far(TYPE1, 1)), (None, None));
    assert_eq!((rig.near(OTHER, 1), rig.far(IOMMUFD, 1)), (Some(PAGE), Some(1)));
    for endpoint in [NEAR, TYPE1] {
        let bypass = Request::Attach { domain: 5, endpoint, flags: AttachFlags::BYPASS };
        assert_eq!(rig.send(bypass), Status::Unsupp);
        assert_eq!(rig.attach(1, endpoint), Status::Ok);
    }
    assert_eq!(rig.map(1, range(0, 1), 3), Status::Ok);
    rig.assert_alike(NEAR, TYPE1);
    for endpoint in [NEAR, TYPE1] {
        assert_eq!(rig.detach(1, endpoint), Status::Ok);
    }
    assert_eq!((rig.near(NEAR, 0), rig.far(TYPE1, 0)), (None, None));
}

#[test]
fn all_domains_together_keep_to_the_limits() {
    let mut rig = Rig::new(1000, Tuning::default());
    assert_eq!(rig.attach(1, NEAR), Status::Ok);
    assert_eq!(rig.attach(2, OTHER), Status::Ok);
    // Lone pages far apart cost most.
    let mut full = [0; 2];
    for n in 0..2000_u64 {
        for domain in [1, 2] {
            let at = Range::from_len(Iova(n << 30), PAGE).unwrap();
            match rig.map(domain, at, 0) {
                Status::Ok => {}
                Status::NoMem => full[domain as usize - 1] += 1,
                other => panic!("{other:?}"),
            }
            assert!(rig.endpoints.budget().table_bytes() <= 1 << 20);
        }
    }
    assert!(full.iter().all(|&full| full > 1500), "{full:?}");
    // What one domain leaves is there for the other.
    assert_eq!(rig.unmap(1, Range::ALL), Status::Ok);
    for n in 0..50 {
        let at = Range::from_len(Iova(n << 40 | 1 << 20), PAGE).unwrap();
        assert_eq!(rig.map(2, at, 0), Status::Ok);
    }
}
