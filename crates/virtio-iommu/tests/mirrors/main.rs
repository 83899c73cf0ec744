//! Domains with members behind a real IOMMU: every member has the mappings that the driver sees,
//! whatever fails.

mod races;

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use proptest::prelude::*;
use ringfence_iommu::{
    Domain, Error, Geometry, GuestPhys, HostAddr, Iova, PageSizes, Prot, Range, Result, SoftDomain,
    shootdown::Shootdown,
    table::{Limits, Mapping},
};
use ringfence_iommu_testing::{Faulty, Kind, Stage, When};
use ringfence_virtio_iommu::{
    device::{
        Backing, Binding, Device, DeviceConfig, EndpointInfo, HostRegion, Joint, Mirror, Outside,
        Session,
    },
    wire::{
        AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, Status, TAIL_LEN,
        UnmapRequest, parse_tail,
    },
};

type Soft = SoftDomain<GuestPhys>;
type Host = Faulty<Arc<SoftDomain<HostAddr>>>;

fn range(first: u64, last: u64) -> Range {
    Range::new(Iova(first), Iova(last)).expect("a range")
}

fn page(n: u64) -> Range {
    range(n << 12, (n << 12) + 0xfff)
}

/// Two regions side by side for the guest and apart for the host, and one further up.
const MEMORY: [(u64, u64, u64); 3] = [
    (0, 0xf_ffff, 0x7000_0000),
    (0x10_0000, 0x1f_ffff, 0x9000_0000),
    (0x100_0000, 0x10f_ffff, 0xa000_0000),
];

fn memory() -> impl Iterator<Item = HostRegion> {
    MEMORY.into_iter().map(|(first, last, host)| HostRegion {
        guest: (GuestPhys(first), GuestPhys(last)),
        host: HostAddr(host),
    })
}

/// A mirror of that memory.
fn mirror(domain: Arc<dyn Domain<Target = HostAddr>>, can_bypass: bool) -> Arc<Mirror> {
    // SAFETY: no device reaches it: it is pretended.
    unsafe { Mirror::new(domain, memory(), can_bypass) }
}

/// The host address of a guest address.
fn host(phys: u64) -> Option<u64> {
    let of = |&(first, last, host)| (first..=last).contains(&phys).then(|| phys - first + host);
    MEMORY.iter().find_map(of)
}

/// An endpoint behind a real IOMMU, and what it sees.
struct Far {
    outside: Outside<Soft>,
    domain: Arc<Host>,
}

impl Far {
    fn new(geometry: Geometry, limits: Limits, can_bypass: bool) -> Far {
        let soft = SoftDomain::new(geometry, limits, Shootdown::new(0));
        let domain = Arc::new(Faulty::new(soft, 0));
        let mirror = mirror(domain.clone(), can_bypass);
        Far { outside: Outside::new(mirror), domain }
    }

    fn plain() -> Far {
        Far::new(Geometry::new(PageSizes::X86, Range::ALL), Limits::NONE, true)
    }

    /// All pages that it reaches.
    fn seen(&self) -> BTreeMap<u64, (u64, Prot)> {
        let mut seen = BTreeMap::new();
        for Mapping { range, target, prot } in mappings(&*self.domain) {
            for offset in (0..=range.extent()).step_by(4096) {
                seen.insert(range.first().0 + offset, (target + offset, prot));
            }
        }
        seen
    }
}

fn mappings(domain: &impl Domain) -> Vec<Mapping> {
    let mut all = Vec::with_capacity(1 << 12);
    domain.mappings_from(Iova(0), &mut all).unwrap();
    assert!(all.len() < all.capacity());
    all
}

/// Endpoints 1 and 2 in this process, 11 and 12 behind an IOMMU; 12 cannot bypass.
struct Endpoints {
    shootdown: Arc<Shootdown>,
    near: Mutex<BTreeMap<u32, Binding<Arc<Joint<Soft>>>>>,
    far: BTreeMap<u32, Far>,
}

impl Backing for Endpoints {
    type Domain = Joint<Soft>;

    fn endpoint(&self, id: u32) -> Option<EndpointInfo> {
        [1, 2, 11, 12].contains(&id).then(EndpointInfo::default)
    }
    fn endpoints(&self) -> Vec<u32> {
        vec![1, 2, 11, 12]
    }
    fn create_domain(&self) -> Result<Arc<Joint<Soft>>> {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        Ok(Joint::new(SoftDomain::new(geometry, Limits::NONE, Arc::clone(&self.shootdown))))
    }
    fn set_domain(&self, endpoint: u32, to: Binding<Arc<Joint<Soft>>>) -> Result<()> {
        match self.far.get(&endpoint) {
            Some(far) => far.outside.bind(to),
            None => {
                self.near.lock().insert(endpoint, to);
                Ok(())
            }
        }
    }
}

struct Rig {
    endpoints: Arc<Endpoints>,
    device: Device<Endpoints>,
    session: Session<Endpoints>,
}

/// All that can be seen: the domains' mappings, and what each far endpoint reaches.
type Seen = (Vec<Vec<Mapping>>, Vec<BTreeMap<u64, (u64, Prot)>>);

impl Rig {
    fn new() -> Rig {
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let cannot = Far::new(geometry, Limits::NONE, false);
        Rig::with([(11, Far::plain()), (12, cannot)])
    }

    fn with(far: [(u32, Far); 2]) -> Rig {
        let (shootdown, near) = (Shootdown::new(0), Mutex::default());
        let endpoints = Arc::new(Endpoints { shootdown, near, far: far.into() });
        let options = DeviceConfig::default();
        let features = options.features.bits();
        let device = Device::new(Arc::clone(&endpoints), options);
        device.set_features(features);
        Rig { endpoints, device, session: Session::new() }
    }

    fn send(&mut self, request: Request) -> Status {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        let mut reply = [0; TAIL_LEN];
        let used = self.device.handle(&mut self.session, &bytes[..len], &mut reply);
        self.device.begin_sync(&mut self.session);
        assert_eq!(self.device.poll_sync(&mut self.session), Ok(true));
        assert_eq!(used as usize, TAIL_LEN);
        parse_tail(reply).expect("a status")
    }

    fn attach(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Attach { domain, endpoint, flags: AttachFlags::empty() })
    }

    fn bypass(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Attach { domain, endpoint, flags: AttachFlags::BYPASS })
    }

    fn detach(&mut self, domain: u32, endpoint: u32) -> Status {
        self.send(Request::Detach { domain, endpoint })
    }

    fn map(&mut self, domain: u32, range: Range, phys: u64) -> Status {
        let flags = MapFlags::READ | MapFlags::WRITE;
        self.send(Request::Map(MapRequest { domain, range, phys, flags }))
    }

    fn unmap(&mut self, domain: u32, range: Range) -> Status {
        self.send(Request::Unmap(UnmapRequest { domain, range }))
    }

    fn far(&self, endpoint: u32) -> &Far {
        &self.endpoints.far[&endpoint]
    }

    /// Where endpoint 11 or 12 gets at `iova`.
    fn reaches(&self, endpoint: u32, iova: u64) -> Option<u64> {
        self.far(endpoint).domain.iova_to_phys(Iova(iova)).map(|host| host.0)
    }

    fn failures(&self) -> u64 {
        self.endpoints.far.values().map(|far| far.outside.mirror().failures()).sum()
    }

    fn bindings(&self) -> Vec<Binding<Arc<Joint<Soft>>>> {
        let near = self.endpoints.near.lock().values().cloned().collect::<Vec<_>>();
        let far = self.endpoints.far.values().map(|far| far.outside.binding());
        near.into_iter().chain(far).collect()
    }

    fn seen(&self) -> Seen {
        let domains = self.bindings().into_iter().map(|binding| match binding {
            Binding::Domain(joint) => mappings(&*joint),
            _ => Vec::new(),
        });
        (domains.collect(), self.endpoints.far.values().map(Far::seen).collect())
    }

    /// Whether each far endpoint reaches what its binding says and nothing else (rule V20).
    fn assert_mirrors_match(&self) {
        for far in self.endpoints.far.values() {
            let expected: Vec<(u64, u64, u64, Prot)> = match far.outside.binding() {
                Binding::Blocked => vec![],
                Binding::Bypass => {
                    MEMORY.iter().map(|&(a, b, _)| (a, b - a, a, Prot::RW)).collect()
                }
                Binding::Domain(joint) => mappings(&*joint)
                    .iter()
                    .map(|m| (m.range.first().0, m.range.extent(), m.target, m.prot))
                    .collect(),
            };
            let pages = expected.into_iter().flat_map(|(iova, extent, phys, prot)| {
                let page = move |at| (iova + at, (host(phys + at).expect("memory"), prot));
                (0..=extent).step_by(4096).map(page)
            });
            assert_eq!(far.seen(), pages.collect());
        }
    }
}

#[test]
fn every_member_has_a_mapping_or_none() {
    // rule V20
    let mut rig = Rig::new();
    assert_eq!(rig.attach(1, 1), Status::Ok);
    assert_eq!(rig.attach(1, 11), Status::Ok);
    assert_eq!(rig.map(1, page(5), 0x3000), Status::Ok);
    assert_eq!(rig.reaches(11, 0x5123), Some(0x7000_3123));
    // One mapping in two pieces.
    assert_eq!(rig.map(1, range(0x1_0000, 0x1_1fff), 0xf_f000), Status::Ok);
    assert_eq!(rig.reaches(11, 0x1_0000), Some(0x700f_f000));
    assert_eq!(rig.reaches(11, 0x1_1000), Some(0x9000_0000));
    rig.assert_mirrors_match();
    // No memory there, or not to the end of it: no member gets it.
    for (at, phys) in [(0x20_0000, 0xfee0_0000), (0x20_0000, 0x1f_f000)] {
        assert_eq!(rig.map(1, range(at, at + 0x1fff), phys), Status::Unsupp);
        let Binding::Domain(joint) = &rig.bindings()[0] else { panic!("it is attached") };
        assert_eq!(joint.iova_to_phys(Iova(at)), None);
    }
    assert_eq!(rig.map(1, page(5), 0), Status::Inval);
    rig.assert_mirrors_match();
    // rule V22
    assert_eq!(rig.unmap(1, range(0, 0x1_0fff)), Status::Range);
    assert_eq!(rig.reaches(11, 0x5123), Some(0x7000_3123));
    // Found out before a mirror is touched, which could.
    rig.far(11).domain.inject(Kind::Unmap, When::Always, Stage::Before);
    assert_eq!(rig.unmap(1, range(0x1_1000, 0x1_1fff)), Status::Range);
    rig.far(11).domain.clear();
    assert_eq!(rig.unmap(1, range(0, 0x1_1fff)), Status::Ok);
    rig.assert_mirrors_match();
    assert_eq!(rig.reaches(11, 0x1_1000), None);
}

#[test]
fn an_endpoint_that_joins_reaches_what_is_mapped_and_one_that_leaves_nothing() {
    // rule V12
    // rule V14
    let mut rig = Rig::new();
    assert_eq!(rig.attach(1, 1), Status::Ok);
    for n in 0..1000 {
        assert_eq!(rig.map(1, page(n), (n * 7 % 256) << 12), Status::Ok);
    }
    for endpoint in [11, 12] {
        assert_eq!(rig.attach(1, endpoint), Status::Ok);
        rig.assert_mirrors_match();
        assert_eq!(rig.far(endpoint).seen().len(), 1000);
    }
    assert_eq!(rig.detach(1, 11), Status::Ok);
    assert!(rig.far(11).seen().is_empty());
    assert_eq!(rig.attach(2, 12), Status::Ok);
    assert!(rig.far(12).seen().is_empty());
    assert_eq!(rig.map(2, page(0), 0), Status::Ok);
    rig.assert_mirrors_match();
    rig.device.reset().unwrap();
    assert!(rig.far(12).seen().is_empty());
}

#[test]
fn an_endpoint_that_cannot_have_what_is_mapped_stays_where_it_was() {
    // rule V12
    let geometry = Geometry::new(PageSizes::X86, range(0, 0xffff_ffff));
    let small = Limits { mappings: 3, ..Limits::NONE };
    let mut rig = Rig::with([
        (11, Far::new(geometry.clone(), Limits::NONE, true)),
        (12, Far::new(geometry, small, true)),
    ]);
    for endpoint in [1, 2] {
        assert_eq!(rig.attach(endpoint, endpoint), Status::Ok);
    }
    for endpoint in [11, 12] {
        assert_eq!(rig.attach(2, endpoint), Status::Ok);
    }
    assert_eq!(rig.map(2, page(9), 0x9000), Status::Ok);
    let high = 1 << 40;
    assert_eq!(rig.map(1, page(0), 0), Status::Ok);
    assert_eq!(rig.map(1, range(high, high + 0xfff), 0), Status::Ok);
    assert_eq!(rig.attach(1, 11), Status::Unsupp, "it lies outside of what it can map");
    rig.assert_mirrors_match();
    assert_eq!(rig.reaches(11, 0x9000), Some(0x7000_9000));
    assert_eq!(rig.unmap(1, range(high, high + 0xfff)), Status::Ok);
    assert_eq!(rig.map(1, page(3), 0x1000_0000), Status::Ok);
    assert_eq!(rig.attach(1, 11), Status::Unsupp, "no memory there");
    assert_eq!(rig.unmap(1, page(3)), Status::Ok);
    for n in 1..4 {
        assert_eq!(rig.map(1, page(n), 0), Status::Ok);
    }
    assert_eq!(rig.attach(1, 12), Status::NoMem);
    assert_eq!(rig.reaches(12, 0x9000), Some(0x7000_9000));
    rig.assert_mirrors_match();
    assert_eq!(rig.attach(1, 11), Status::Ok);
    // And what it cannot map is mapped for no member.
    assert_eq!(rig.map(1, range(high, high + 0xfff), 0), Status::Range);
    rig.assert_mirrors_match();
    assert_eq!(rig.far(11).outside.mirror().failures(), 0);
}

#[test]
fn bypass_is_all_of_guest_memory_or_refused() {
    // rule V5
    // rule V10
    let mut rig = Rig::new();
    for nth in 1..=3 {
        rig.far(11).domain.inject(Kind::Map, When::Nth(nth), Stage::Before);
        assert_eq!(rig.bypass(1, 11), Status::DevErr);
        assert!(rig.far(11).seen().is_empty());
    }
    assert_eq!(rig.bypass(1, 11), Status::Ok);
    rig.assert_mirrors_match();
    assert_eq!(rig.reaches(11, 0x10_0123), Some(0x9000_0123));
    assert_eq!(rig.bypass(1, 12), Status::Unsupp);
    assert!(rig.far(12).seen().is_empty());
    assert_eq!(rig.bypass(1, 1), Status::Ok);
    // A DETACH that fails leaves the endpoint attached, however many mappings were removed.
    rig.far(11).domain.inject(Kind::Sync, When::Nth(1), Stage::Before);
    assert_eq!(rig.detach(1, 11), Status::DevErr);
    rig.assert_mirrors_match();
    assert_eq!(rig.detach(1, 11), Status::Ok);
    assert!(rig.far(11).seen().is_empty());
    // rule V6: an endpoint that cannot bypass reaches nothing.
    rig.device.write_config(36, &[1]).unwrap();
    assert_eq!(rig.reaches(11, 0x1000), Some(0x7000_1000));
    assert!(rig.far(12).seen().is_empty());
    rig.assert_mirrors_match();
    rig.device.write_config(36, &[0]).unwrap();
    assert!(rig.far(11).seen().is_empty());
}

#[test]
fn an_attach_to_the_domain_it_is_in_restores_what_a_failed_one_could_not() {
    // rule V20
    let mut rig = Rig::new();
    assert_eq!((rig.attach(1, 11), rig.map(1, page(1), 0x1000)), (Status::Ok, Status::Ok));
    assert_eq!((rig.attach(2, 1), rig.map(2, page(2), 0x2000)), (Status::Ok, Status::Ok));
    rig.far(11).domain.inject(Kind::Map, When::Always, Stage::Before);
    assert_ne!(rig.attach(2, 11), Status::Ok);
    assert_eq!((rig.reaches(11, 0x1000), rig.failures()), (None, 1));
    assert_ne!(rig.attach(1, 11), Status::Ok, "it reaches nothing yet");
    rig.far(11).domain.clear();
    assert_eq!(rig.attach(1, 11), Status::Ok);
    assert_eq!(rig.reaches(11, 0x1000), Some(0x7000_1000));
    rig.assert_mirrors_match();
}

#[test]
fn a_larger_granule_takes_what_it_can_express() {
    let geometry = Geometry::new(PageSizes::from_granule(1 << 16).unwrap(), Range::ALL);
    let mut rig = Rig::with([(11, Far::new(geometry, Limits::NONE, true)), (12, Far::plain())]);
    assert_eq!(rig.attach(1, 11), Status::Ok);
    assert_eq!(rig.map(1, page(1), 0x1000), Status::Range);
    assert_eq!(rig.map(1, range(0x1_0000, 0x1_ffff), 0x1_0000), Status::Ok);
    assert_eq!(rig.reaches(11, 0x1_0000), Some(0x7001_0000));
    // An UNMAP may begin and end at any granule of the device's (rule V40).
    assert_eq!(rig.unmap(1, range(0xf000, 0x2_0fff)), Status::Ok);
    assert!(rig.far(11).seen().is_empty());
}

#[test]
fn what_one_member_cannot_do_is_undone_for_all() {
    // rule V20
    let mut rig = Rig::new();
    for endpoint in [1, 11, 12] {
        assert_eq!(rig.attach(1, endpoint), Status::Ok);
    }
    assert_eq!(rig.map(1, page(1), 0), Status::Ok);
    let before = rig.seen();
    // The second of two, whichever that is; and the second piece.
    for endpoint in [11, 12] {
        for (kind, nth) in [(Kind::Map, 1), (Kind::Map, 2), (Kind::SyncMap, 1), (Kind::SyncMap, 2)]
        {
            rig.far(endpoint).domain.inject(kind, When::Nth(nth), Stage::Before);
            assert_eq!(rig.map(1, range(0x1_0000, 0x1_1fff), 0xf_f000), Status::DevErr);
            assert_eq!(rig.seen(), before);
        }
        assert_eq!(rig.failures(), 0);
    }
    for endpoint in [11, 12] {
        for kind in [Kind::Unmap, Kind::Sync] {
            rig.far(endpoint).domain.inject(kind, When::Nth(1), Stage::Before);
            assert_eq!(rig.unmap(1, Range::ALL), Status::DevErr);
            assert_eq!(rig.seen(), before);
        }
    }
    assert_eq!(rig.failures(), 4, "what could not be removed is counted");
    rig.far(11).domain.inject(Kind::Sync, When::Nth(1), Stage::Before);
    assert_eq!(rig.detach(1, 11), Status::DevErr);
    assert_eq!(rig.seen(), before);
    assert_eq!(rig.unmap(1, Range::ALL), Status::Ok);
    rig.assert_mirrors_match();
}

/// How many calls fail that [`Rig::break_off`] makes fail.
const FEW: u64 = 8;

impl Rig {
    /// Calls of this kind from the nth on fail, until [`Faulty::clear`].
    fn break_off(&self, endpoint: u32, kind: Kind, first: u64) {
        for nth in first..first + FEW {
            self.far(endpoint).domain.inject(kind, When::Nth(nth), Stage::Before);
        }
    }
}

#[test]
fn bypass_that_could_not_be_ended_is_ended_by_the_next_request_for_it() {
    // rule V6
    let mut rig = Rig::new();
    rig.device.write_config(36, &[1]).unwrap();
    assert!(rig.reaches(11, 0).is_some());
    rig.break_off(11, Kind::Unmap, 1);
    for _ in 0..2 {
        assert!(rig.device.write_config(36, &[0]).is_err(), "it bypasses still");
    }
    assert!(rig.device.reset().is_err());
    rig.far(11).domain.clear();
    rig.device.reset().unwrap();
    assert!(rig.far(11).seen().is_empty());
    rig.assert_mirrors_match();
    assert_eq!(rig.attach(1, 11), Status::Ok);
}

#[test]
fn a_reset_that_failed_is_not_over_before_all_endpoints_are_out() {
    // rule V4
    let mut rig = Rig::new();
    assert_eq!(rig.attach(1, 11), Status::Ok);
    assert_eq!(rig.map(1, page(1), 0), Status::Ok);
    rig.break_off(11, Kind::Unmap, 1);
    for _ in 0..2 {
        assert!(rig.device.reset().is_err(), "it reaches what was mapped");
    }
    rig.far(11).domain.clear();
    rig.device.reset().unwrap();
    assert!(rig.far(11).seen().is_empty());
}

#[test]
fn what_could_not_be_unmapped_for_an_endpoint_goes_before_its_next_change() {
    // rule V20
    let mut rig = Rig::new();
    for (domain, endpoint) in [(1, 11), (2, 1)] {
        assert_eq!(rig.attach(domain, endpoint), Status::Ok);
    }
    assert_eq!([2, 3].map(|n| rig.map(2, page(n), n << 12)), [Status::Ok; 2]);
    // It leaves, the second mapping cannot be made, and the first not be taken back.
    rig.far(11).domain.inject(Kind::Map, When::Nth(2), Stage::Before);
    rig.break_off(11, Kind::Unmap, 2);
    assert_eq!(rig.attach(2, 11), Status::DevErr);
    assert_eq!(rig.reaches(11, 0x2000), host(0x2000), "it is there still");
    assert_eq!(rig.detach(1, 11), Status::DevErr);
    rig.far(11).domain.clear();
    assert_eq!(rig.detach(1, 11), Status::Ok);
    assert!(rig.far(11).seen().is_empty());
}

/// A step of a random driver.
fn step() -> impl Strategy<Value = Request> {
    let pages = (0u64..40, 0u64..6)
        .prop_map(|(first, more)| range(first << 12, ((first + more) << 12) + 0xfff));
    let domain = 1u32..4;
    let endpoint = prop_oneof![Just(1u32), Just(2), Just(11), Just(12)];
    prop_oneof![
        3 => (domain.clone(), endpoint.clone(), 0u32..6).prop_map(|(domain, endpoint, flags)| {
            let flags = AttachFlags::from_bits_truncate(u32::from(flags == 0));
            Request::Attach { domain, endpoint, flags }
        }),
        1 => (domain.clone(), endpoint)
            .prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
        // Around the border of two regions, and sometimes beyond the end of the second.
        8 => (domain.clone(), pages.clone(), prop_oneof![0xf0u64..0x104, 0x1f0u64..0x202]).prop_map(
            |(domain, range, phys)| {
                let flags = MapFlags::READ | MapFlags::WRITE;
                Request::Map(MapRequest { domain, range, phys: phys << 12, flags })
            }
        ),
        4 => (domain, pages)
            .prop_map(|(domain, range)| Request::Unmap(UnmapRequest { domain, range })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_fails_at_any_step_has_changed_nothing(
        steps in proptest::collection::vec(step(), 1..40),
        kind in prop_oneof![Just(Kind::Map), Just(Kind::SyncMap), Just(Kind::Unmap), Just(Kind::Sync)],
        nth in 1u64..30,
        error in prop_oneof![
            Just(Error::NoMemory { operation: "map", range: Range::ALL }),
            Just(Error::Gone("a test")),
        ],
    ) {
        let mut rig = Rig::new();
        for far in rig.endpoints.far.values() {
            far.domain.inject_error(kind, When::Nth(nth), Stage::Before, error);
        }
        for request in steps {
            let before = rig.seen();
            let failures = rig.failures();
            let injected: u64 = rig.endpoints.far.values().map(|far| far.domain.injected()).sum();
            let status = rig.send(request);
            let now: u64 = rig.endpoints.far.values().map(|far| far.domain.injected()).sum();
            if now != injected && ![Status::NoMem, Status::DevErr].contains(&status) {
                // It could not be done anyhow, and the failure was met on the way back.
                prop_assert!(rig.failures() > failures && status != Status::Ok);
                break;
            }
            if status != Status::Ok {
                prop_assert_eq!(rig.seen(), before, "{:?}: {:?}", request, status);
            }
            rig.assert_mirrors_match();
        }
    }
}
