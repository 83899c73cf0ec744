//! The device against the rules of virtio 1.3, section 5.13, request by request.

mod common;

use common::{Bench, RESERVED, range};
use proptest::prelude::*;
use ringfence_iommu::{
    Error, Iova, PageSizes, Prot, Range, ReservedKind, ReservedRegion, table::Limits,
};
use ringfence_virtio_iommu::{
    device::DeviceConfig,
    wire::{
        AttachFlags, CONFIG_LEN, Features, IommuConfig, Kind, MAX_REQUEST_LEN, MapFlags,
        MapRequest, Properties, Request, Status, TAIL_LEN, UnmapRequest,
    },
};

fn page(n: u64) -> Range {
    range(n << 12, (n << 12) + 0xfff)
}

#[test]
fn map_unmap_is_offered_and_the_old_bypass_never() {
    // rule V1
    let options = DeviceConfig { features: Features::all(), ..DeviceConfig::default() };
    let bench = Bench::with(options, Limits::NONE);
    assert!(bench.device.features().contains(Features::MAP_UNMAP));
    assert!(!bench.device.features().contains(Features::BYPASS));
}

#[test]
fn the_page_size_mask_has_a_bit() {
    // rule V2
    let bytes = Bench::new().device.config();
    assert_eq!(bytes.len(), CONFIG_LEN);
    assert_ne!(bytes[..8], [0; 8]);
}

#[test]
fn bypass_is_zero_or_one_and_survives_a_device_reset_but_not_a_system_reset() {
    // rule V3
    let bench = Bench::new();
    let bypass = |bench: &Bench| bench.device.config()[36];
    assert_eq!(bypass(&bench), 0);
    for (written, read) in [(1u8, 1), (7, 1), (0, 0), (255, 0), (1, 1)] {
        bench.device.write_config(36, &[written]).unwrap();
        assert_eq!(bypass(&bench), read);
    }
    bench.device.reset().unwrap();
    assert_eq!(bypass(&bench), 1);
    bench.device.system_reset().unwrap();
    assert_eq!(bypass(&bench), 0);
}

#[test]
fn bypass_is_written_only_once_negotiated_and_nothing_else_ever() {
    let bench = Bench::new();
    let before = bench.device.config();
    bench.device.write_config(0, &[0xff; 36]).unwrap();
    assert_eq!(bench.device.config(), before);
    bench.device.set_features((Features::MAP_UNMAP).bits());
    bench.device.write_config(36, &[1]).unwrap();
    assert_eq!(bench.device.config(), before);
}

#[test]
fn after_a_reset_no_endpoint_is_attached() {
    // rule V4
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, page(1), 0), Status::Ok);
    bench.device.reset().unwrap();
    assert_eq!(bench.reads(1, 0x1000), None);
    assert_eq!(bench.device.domains(), 0);
    bench.device.set_features(u64::MAX);
    assert_eq!(bench.map(1, page(2), 0), Status::NoEnt);
}

#[test]
fn an_unattached_endpoint_bypasses_if_bypass_is_offered_and_set() {
    // rule V5
    let options = DeviceConfig { bypass: true, ..DeviceConfig::default() };
    let mut bench = Bench::with(options, Limits::NONE);
    bench.device.set_features(Features::MAP_UNMAP.bits()); // not accepted: it counts all the same
    assert_eq!(bench.reads(1, 0x1234), Some(0x1234));
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.reads(1, 0x1234), None, "attached: only what is mapped");
    assert_eq!(bench.detach(1, 1), Status::Ok);
    assert_eq!(bench.reads(1, 0x1234), Some(0x1234));

    let features = Features::all().difference(Features::BYPASS_CONFIG);
    let options = DeviceConfig { bypass: true, features, ..DeviceConfig::default() };
    assert_eq!(Bench::with(options, Limits::NONE).reads(1, 0x1234), None, "not offered");
}

#[test]
fn unattached_endpoints_reach_nothing() {
    // rule V6
    let bench = Bench::new();
    assert_eq!(bench.reads(1, 0), None);
    bench.device.write_config(36, &[1]).unwrap();
    assert_eq!(bench.reads(1, 0), Some(0));
    bench.device.write_config(36, &[0]).unwrap();
    assert_eq!(bench.reads(1, 0), None);
}

#[test]
fn success_is_ok_the_tail_is_zero_and_the_head_is_not_looked_at() {
    // rule V7
    let mut bench = Bench::new();
    let attach = Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() };
    // `changed` checks the reserved bytes of the tail.
    assert_eq!(bench.changed(attach, |bytes| bytes[1..4].fill(0xff)), Status::Ok);
}

#[test]
fn an_unknown_type_or_a_buffer_without_room_for_a_tail_is_left_alone() {
    // rule V8
    let mut bench = Bench::new();
    for kind in (0..=u8::MAX).filter(|&kind| Kind::from_u8(kind).is_none()) {
        let mut request = [0; MAX_REQUEST_LEN];
        request[0] = kind;
        assert_eq!(bench.raw(&request, 8), (0, vec![0xee; 8]));
    }
    for room in 0..TAIL_LEN {
        let mut request = [0; MAX_REQUEST_LEN];
        let attach = Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() };
        let len = attach.emit(&mut request);
        assert_eq!(bench.raw(&request[..len], room), (0, vec![0xee; room]));
    }
    assert_eq!(bench.device.domains(), 0);
}

#[test]
fn attach_refuses_reserved_bytes_unknown_flags_and_unknown_endpoints() {
    // rule V9
    let mut bench = Bench::new();
    let attach = Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() };
    for at in 16..20 {
        assert_eq!(bench.changed(attach, |bytes| bytes[at] = 1), Status::Inval);
    }
    assert_eq!(bench.changed(attach, |bytes| bytes[12] = 2), Status::Inval);
    assert_eq!(bench.changed(attach, |bytes| bytes[15] = 0x80), Status::Inval);
    assert_eq!(bench.attach(1, 77), Status::NoEnt);
    assert_eq!(bench.device.domains(), 0);
    // The flag BYPASS is unknown unless negotiated.
    bench.device.set_features(Features::MAP_UNMAP.bits());
    assert_eq!(bench.attach_bypass(1, 1), Status::Inval);
}

#[test]
fn attach_makes_a_domain_and_never_mixes_bypass_with_mappings() {
    // rule V10
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.attach_bypass(1, 2), Status::Inval);
    assert_eq!(bench.attach_bypass(1, 1), Status::Inval);
    assert_eq!(bench.attach_bypass(2, 2), Status::Ok);
    assert_eq!(bench.attach(2, 3), Status::Inval);
    assert_eq!(bench.reads(2, 0x5555), Some(0x5555));
    assert_eq!(bench.reads(3, 0x5555), None);
}

#[test]
fn attach_of_an_attached_endpoint_detaches_it_first() {
    // rule V11
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, page(1), 0x9000), Status::Ok);
    assert_eq!(bench.attach(1, 1), Status::Ok, "to the same domain: nothing changes");
    assert_eq!(bench.reads(1, 0x1000), Some(0x9000));
    assert_eq!(bench.attach(2, 1), Status::Ok);
    assert_eq!(bench.reads(1, 0x1000), None);
    assert_eq!(bench.device.domains(), 1, "the first domain has gone with its last endpoint");
    assert_eq!(bench.map(1, page(2), 0), Status::NoEnt);
}

#[test]
fn a_refused_attach_leaves_the_endpoint_where_it_was() {
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, page(1), 0x9000), Status::Ok);
    assert_eq!(bench.attach_bypass(2, 2), Status::Ok);
    assert_eq!(bench.attach(2, 1), Status::Inval);
    assert_eq!(bench.reads(1, 0x1000), Some(0x9000));
}

#[test]
fn an_endpoint_whose_regions_are_mapped_cannot_join() {
    // rule V12
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, page(3), 0), Status::Ok);
    assert_eq!(bench.attach(1, 8), Status::Unsupp);
    assert_eq!(bench.reads(8, 0x3000), None);
    assert_eq!(bench.unmap(1, page(3)), Status::Ok);
    assert_eq!(bench.map(1, page(0x100), 0x7000), Status::Ok);
    assert_eq!(bench.attach(1, 8), Status::Ok);
    assert_eq!(bench.reads(8, 0x10_0000), Some(0x7000), "not rejected: attached");
}

#[test]
fn an_endpoint_that_cannot_be_moved_stays_and_the_status_reports_why() {
    // rule V11
    // rule V12
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, page(1), 0x9000), Status::Ok);
    assert_eq!(bench.attach(2, 2), Status::Ok);
    for (error, status) in [
        (Error::NoMemory { operation: "map", range: page(1) }, Status::NoMem),
        (Error::Full { what: "pins", used: 1, limit: 1 }, Status::NoMem),
        (Error::Gone("a test"), Status::DevErr),
        (Error::Unsupported("a test"), Status::Unsupp),
        (Error::OutsideAperture { range: page(1), aperture: page(0) }, Status::Unsupp),
    ] {
        *bench.endpoints.refusal.lock() = Some(error);
        for to in [2, 3] {
            assert_eq!(bench.attach(to, 1), status);
            assert_eq!(bench.attach_bypass(3, 1), status);
        }
        assert_eq!(bench.reads(1, 0x1000), Some(0x9000));
        assert_eq!(bench.device.domains(), 2, "the domain that was to be made is not there");
        // What it is in already it may be in.
        *bench.endpoints.refusal.lock() = None;
        assert_eq!(bench.attach(1, 1), Status::Ok);
    }
    // rule V6: an endpoint that cannot bypass reaches nothing.
    *bench.endpoints.refusal.lock() = Some(Error::Unsupported("a test"));
    bench.device.write_config(36, &[1]).unwrap();
    assert_eq!(bench.reads(3, 0x1000), None);
    assert_eq!(bench.detach(1, 1), Status::Ok);
    assert_eq!(bench.reads(1, 0x1000), None);
}

#[test]
fn an_endpoint_that_goes_takes_its_domain_with_it_and_one_that_comes_is_unattached() {
    // rule V14
    let mut bench = Bench::new();
    for endpoint in [1, 2] {
        assert_eq!(bench.attach(1, endpoint), Status::Ok);
    }
    assert_eq!(bench.map(1, page(1), 0x9000), Status::Ok);
    bench.endpoints.gone.lock().push(1);
    assert_eq!(bench.attach(2, 1), Status::NoEnt);
    assert_eq!(bench.device.endpoint_removed(1).map(|_| ()), Ok(()));
    assert_eq!(bench.reads(1, 0x1000), None);
    assert_eq!(bench.reads(2, 0x1000), Some(0x9000));
    assert_eq!(bench.device.endpoint_removed(2).map(|_| ()), Ok(()));
    assert_eq!(bench.device.domains(), 0);
    assert_eq!(bench.map(1, page(2), 0), Status::NoEnt);
    // rule V5
    bench.endpoints.gone.lock().clear();
    bench.device.write_config(36, &[1]).unwrap();
    bench.endpoints.bindings.lock().remove(&1);
    bench.device.endpoint_added(1).unwrap();
    assert_eq!(bench.reads(1, 0x1234), Some(0x1234));
    // A second call for an attached endpoint changes nothing.
    assert_eq!(bench.attach(1, 1), Status::Ok);
    bench.device.endpoint_added(1).unwrap();
    assert_eq!(bench.reads(1, 0x1234), None);
}

#[test]
fn detach_ignores_reserved_bytes_and_knows_its_endpoints() {
    // rule V13
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.detach(1, 77), Status::NoEnt);
    assert_eq!(bench.detach(2, 1), Status::Inval);
    assert_eq!(bench.detach(1, 2), Status::Inval);
    let detach = Request::Detach { domain: 1, endpoint: 1 };
    assert_eq!(bench.changed(detach, |bytes| bytes[12..].fill(0xff)), Status::Ok);
}

#[test]
fn after_detach_nothing_of_the_domain_is_reachable_and_it_goes_with_its_last_endpoint() {
    // rule V14
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.attach(1, 2), Status::Ok);
    assert_eq!(bench.map(1, page(1), 0x9000), Status::Ok);
    assert_eq!(bench.detach(1, 1), Status::Ok);
    assert_eq!(bench.reads(1, 0x1000), None);
    assert_eq!(bench.reads(2, 0x1000), Some(0x9000));
    assert_eq!(bench.detach(1, 2), Status::Ok);
    assert_eq!(bench.device.domains(), 0);
    assert_eq!(bench.attach(1, 2), Status::Ok);
    assert_eq!(bench.reads(2, 0x1000), None, "a new domain of the same number is empty");
}

#[test]
fn what_stands_off_the_granule_is_out_of_range() {
    // rule V15
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, range(0x1800, 0x1fff), 0), Status::Range);
    assert_eq!(bench.map(1, range(0x1000, 0x1ffe), 0), Status::Range);
    assert_eq!(bench.map(1, page(1), 0x800), Status::Range);
    assert_eq!(bench.map(1, page(1), u64::MAX - 0xfff), Status::Ok, "the last page is a page");
    assert_eq!(bench.map(1, range(0x8000, 0x9fff), u64::MAX - 0xfff), Status::Range);
}

#[test]
fn an_overlap_is_refused_and_changes_nothing() {
    // rule V16
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, range(0x4000, 0x7fff), 0x10000), Status::Ok);
    for wanted in [range(0x4000, 0x7fff), range(0, 0x4fff), range(0x7000, 0x8fff), page(5)] {
        assert_eq!(bench.map(1, wanted, 0x90000), Status::Inval);
    }
    assert_eq!(bench.map(1, Range::ALL, 0), Status::Inval);
    assert_eq!(bench.reads(1, 0x5000), Some(0x11000));
    assert_eq!(bench.reads(1, 0x3000), None);
    assert_eq!(bench.reads(1, 0x8000), None);
}

#[test]
fn map_refuses_unknown_flags_missing_domains_and_bypass_domains() {
    // rule V17
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.attach_bypass(2, 2), Status::Ok);
    let flags = MapFlags::READ;
    let map = Request::Map(MapRequest { domain: 1, range: page(1), phys: 0, flags });
    assert_eq!(bench.changed(map, |bytes| bytes[32] |= 8), Status::Inval);
    assert_eq!(bench.changed(map, |bytes| bytes[35] = 0x80), Status::Inval);
    assert_eq!(bench.changed(map, |bytes| bytes[32] = 0), Status::Inval, "neither read nor write");
    assert_eq!(bench.map(2, page(1), 0), Status::Inval);
    assert_eq!(bench.map(3, page(1), 0), Status::NoEnt);
    let mmio = Request::Map(MapRequest {
        domain: 1,
        range: page(1),
        phys: 0,
        flags: flags | MapFlags::MMIO,
    });
    bench.device.set_features(Features::MAP_UNMAP.bits());
    assert_eq!(bench.send(mmio), Status::Inval, "MMIO was not negotiated");
    bench.device.set_features((Features::MAP_UNMAP | Features::MMIO).bits());
    assert_eq!(bench.send(mmio), Status::Ok);
}

#[test]
fn map_leaves_reserved_regions_and_what_is_outside_of_the_input_range_alone() {
    // rule V18
    let input_range = range(0, (1 << 40) - 1);
    let bench =
        &mut Bench::with(DeviceConfig { input_range, ..DeviceConfig::default() }, Limits::NONE);
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(
        bench.map(1, range(RESERVED.0, RESERVED.1), 0),
        Status::Ok,
        "no endpoint reserves it"
    );
    assert_eq!(bench.unmap(1, range(RESERVED.0, RESERVED.1)), Status::Ok);
    assert_eq!(bench.attach(1, 8), Status::Ok);
    for wanted in [range(RESERVED.0, RESERVED.1), page(0xf), range(0, input_range.last().0)] {
        assert_eq!(bench.map(1, wanted, 0), Status::Inval);
    }
    assert_eq!(bench.detach(1, 8), Status::Ok);
    assert_eq!(bench.map(1, page(0xf), 0), Status::Ok, "its endpoint has left");
    assert_eq!(bench.map(1, range(1 << 40, (1 << 40) + 0xfff), 0), Status::Range);
    assert_eq!(bench.map(1, range((1 << 40) - 0x1000, (1 << 40) + 0xfff), 0), Status::Range);
}

#[test]
fn a_write_needs_the_flag_write() {
    // rule V19
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    let map = |range, flags| Request::Map(MapRequest { domain: 1, range, phys: 0x9000, flags });
    assert_eq!(bench.send(map(page(1), MapFlags::READ)), Status::Ok);
    assert_eq!(bench.send(map(page(2), MapFlags::WRITE)), Status::Ok);
    assert_eq!(bench.endpoints.access(1, 0x1000, Prot::READ), Some(0x9000));
    assert_eq!(bench.endpoints.access(1, 0x1000, Prot::WRITE), None);
    assert_eq!(bench.endpoints.access(1, 0x1000, Prot::RW), None);
    assert_eq!(bench.endpoints.access(1, 0x2000, Prot::WRITE), Some(0x9000));
    assert_eq!(bench.endpoints.access(1, 0x2000, Prot::READ), None);
}

#[test]
fn all_attached_endpoints_translate_over_the_whole_inclusive_range() {
    // rule V20
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.attach(1, 2), Status::Ok);
    assert_eq!(bench.map(1, range(0x5000, 0x8fff), 0x70000), Status::Ok);
    for endpoint in [1, 2] {
        assert_eq!(bench.reads(endpoint, 0x4fff), None);
        assert_eq!(bench.reads(endpoint, 0x5000), Some(0x70000));
        assert_eq!(bench.reads(endpoint, 0x8fff), Some(0x73fff));
        assert_eq!(bench.reads(endpoint, 0x9000), None);
    }
    assert_eq!(bench.attach(2, 3), Status::Ok);
    assert_eq!(bench.map(2, Range::ALL, 0), Status::Ok);
    assert_eq!(bench.reads(3, u64::MAX), Some(u64::MAX));
}

#[test]
fn unmap_knows_its_domains() {
    // rule V21
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.attach_bypass(2, 2), Status::Ok);
    assert_eq!(bench.unmap(3, page(1)), Status::NoEnt);
    assert_eq!(bench.unmap(2, page(1)), Status::Inval);
    let unmap = Request::Unmap(UnmapRequest { domain: 1, range: page(1) });
    assert_eq!(bench.changed(unmap, |bytes| bytes[24] = 1), Status::Inval);
}

#[test]
fn an_unmap_that_would_split_removes_nothing() {
    // rule V22
    let mut bench = Bench::new();
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, page(1), 0x1000), Status::Ok);
    assert_eq!(bench.map(1, range(0x4000, 0x7fff), 0x4000), Status::Ok);
    for wanted in [page(4), page(7), range(0, 0x4fff), range(0x7000, 0xffff), range(0x1000, 0x5fff)]
    {
        assert_eq!(bench.unmap(1, wanted), Status::Range);
        assert_eq!(bench.reads(1, 0x1000), Some(0x1000));
        assert_eq!(bench.reads(1, 0x4000), Some(0x4000));
        assert_eq!(bench.reads(1, 0x7fff), Some(0x7fff));
    }
}

/// The examples of 5.13.6.6: what is mapped, in order, the UNMAP, and whether it succeeds.
type Example = (&'static [(u64, u64)], (u64, u64), bool);
const EXAMPLES: [Example; 7] = [
    (&[], (0, 4), true),
    (&[(0, 9)], (0, 9), true),
    (&[(0, 4), (5, 9)], (0, 9), true),
    (&[(0, 9)], (0, 4), false),
    (&[(0, 4), (5, 9)], (0, 4), true),
    (&[(0, 4)], (0, 9), true),
    (&[(0, 4), (10, 14)], (0, 14), true),
];

#[test]
fn the_seven_examples_of_the_specification_hold() {
    // rule V23
    // rule V22
    for granule in [1, 4096] {
        let scaled = |(first, last): (u64, u64)| range(first * granule, (last + 1) * granule - 1);
        for (number, (maps, unmap, succeeds)) in EXAMPLES.into_iter().enumerate() {
            let page_sizes = PageSizes::from_granule(granule).unwrap();
            let options = DeviceConfig { page_sizes, ..DeviceConfig::default() };
            let mut bench = Bench::with(options, Limits::NONE);
            assert_eq!(bench.attach(1, 1), Status::Ok);
            for &mapping in maps {
                assert_eq!(bench.map(1, scaled(mapping), 0), Status::Ok);
            }
            let expected = if succeeds { Status::Ok } else { Status::Range };
            let status = bench.unmap(1, scaled(unmap));
            assert_eq!(status, expected, "example {} with a granule of {granule}", number + 1);
            for &mapping in maps {
                let gone = succeeds && scaled(unmap).covers(scaled(mapping));
                let reads = bench.reads(1, scaled(mapping).first().0);
                assert_eq!(reads.is_none(), gone, "example {}, mapping {mapping:?}", number + 1);
            }
        }
    }
}

#[test]
fn an_unmap_may_begin_and_end_anywhere_outside_of_mappings() {
    // rule V23
    let input_range = range(0, (1 << 32) - 1);
    let bench =
        &mut Bench::with(DeviceConfig { input_range, ..DeviceConfig::default() }, Limits::NONE);
    assert_eq!(bench.attach(1, 1), Status::Ok);
    for wanted in [range(0x1801, 0x6003), range(0, u64::MAX), range(0x1fff, 0x5000)] {
        assert_eq!(bench.map(1, range(0x2000, 0x4fff), 0), Status::Ok);
        assert_eq!(bench.unmap(1, wanted), Status::Ok, "{wanted}");
        assert_eq!(bench.reads(1, 0x2000), None);
    }
    assert_eq!(bench.map(1, range(0x2000, 0x4fff), 0), Status::Ok);
    for wanted in [range(0x2001, 0x4fff), range(0x1000, 0x4ffe), range(0x2800, 0x2801)] {
        assert_eq!(bench.unmap(1, wanted), Status::Range, "{wanted}");
        assert_eq!(bench.reads(1, 0x2000), Some(0));
    }
    for nowhere in [range(5, 6), range(0x1800, 0x1900), range(1 << 32, u64::MAX)] {
        assert_eq!(bench.unmap(1, nowhere), Status::Ok, "{nowhere}");
    }
}

fn probe(bench: &mut Bench, endpoint: u32, room: usize) -> (usize, Vec<u8>) {
    let mut bytes = [0; MAX_REQUEST_LEN];
    let len = Request::Probe { endpoint }.emit(&mut bytes);
    bytes[8..].fill(0xff); // reserved: to be ignored
    bench.raw(&bytes[..len], room)
}

#[test]
fn probe_is_left_alone_unless_negotiated_and_knows_its_endpoints() {
    // rule V24
    let mut bench = Bench::new();
    let room = 512 + TAIL_LEN;
    let (used, reply) = probe(&mut bench, 1, room);
    assert_eq!((used, reply[512]), (room, Status::Ok as u8));
    let (used, reply) = probe(&mut bench, 77, room);
    assert_eq!((used, reply[512]), (room, Status::NoEnt as u8));
    bench.device.set_features(Features::MAP_UNMAP.bits());
    assert_eq!(probe(&mut bench, 1, room), (0, vec![0xee; room]));
}

#[test]
fn probe_lists_reserved_regions_and_zeroes_the_rest() {
    // rule V25
    let mut bench = Bench::new();
    let (used, reply) = probe(&mut bench, 8, 512 + TAIL_LEN);
    assert_eq!(used, reply.len());
    assert_eq!(reply[..4], [1, 0, 20, 0]);
    assert_eq!(reply[24..28], [1, 0, 20, 0]);
    assert!(reply[48..].iter().all(|&byte| byte == 0));
    let msi = ReservedRegion { range: range(RESERVED.0, RESERVED.1), kind: ReservedKind::Msi };
    let reserved = ReservedRegion { range: range(0, 0xffff), kind: ReservedKind::Reserved };
    assert_eq!(Properties::new(&reply[..512]).collect::<Vec<_>>(), [reserved, msi]);
}

#[test]
fn regions_that_overlap_and_a_second_window_for_msis_are_never_listed() {
    // rule V27
    let mut bench = Bench::new();
    for endpoint in [100, 101] {
        let (_, reply) = probe(&mut bench, endpoint, 512 + TAIL_LEN);
        assert_eq!(reply[512], Status::DevErr as u8);
        assert_eq!(Properties::new(&reply[..512]).count(), 0);
    }
    // Reported regions cannot be mapped for any member, and lead nowhere.
    assert_eq!(bench.attach(1, 8), Status::Ok);
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.map(1, page(RESERVED.0 >> 12), 0), Status::Inval);
    assert_eq!(bench.reads(1, RESERVED.0), None);
}

#[test]
fn properties_smaller_than_probe_size_are_not_written() {
    // rule V26
    let mut bench = Bench::new();
    let (used, reply) = probe(&mut bench, 8, 511 + TAIL_LEN);
    assert_eq!((used, &reply[511..]), (515, &[Status::Inval as u8, 0, 0, 0][..]));
    assert!(reply[..511].iter().all(|&byte| byte == 0xee));
}

#[test]
fn a_mapping_of_one_byte_needs_a_granule_of_one() {
    // rule V38
    for (granule, expected) in [(4096, Status::Inval), (1, Status::Ok)] {
        let page_sizes = PageSizes::from_granule(granule).unwrap();
        let options = DeviceConfig { page_sizes, ..DeviceConfig::default() };
        let mut bench = Bench::with(options, Limits::NONE);
        assert_eq!(bench.attach(1, 1), Status::Ok);
        assert_eq!(bench.map(1, range(5, 5), 5), expected);
    }
}

#[test]
fn requests_beyond_limits_get_no_memory_and_leave_everything_as_it_was() {
    let limits = Limits { mappings: 10, ..Limits::NONE };
    let options = DeviceConfig { max_domains: 2, domain_range: (1, 9), ..DeviceConfig::default() };
    let bench = &mut Bench::with(options, limits);
    assert_eq!(bench.attach(0, 1), Status::Range);
    // rule V9: the status reports the missing endpoint.
    assert_eq!(bench.attach(0, 77), Status::NoEnt);
    assert_eq!(bench.attach(10, 1), Status::Range);
    assert_eq!(bench.attach(1, 1), Status::Ok);
    assert_eq!(bench.attach(2, 2), Status::Ok);
    assert_eq!(bench.attach(3, 3), Status::NoMem);
    assert_eq!(bench.attach(3, 2), Status::Ok, "domain 2 makes room");
    for n in 0..10 {
        assert_eq!(bench.map(1, page(n), 0), Status::Ok);
    }
    assert_eq!(bench.map(1, page(10), 0), Status::NoMem);
    assert_eq!(bench.reads(1, 10 << 12), None);
    assert_eq!(bench.unmap(1, page(3)), Status::Ok);
    assert_eq!(bench.map(1, page(10), 0), Status::Ok);
}

#[test]
fn the_configuration_is_that_of_the_options() {
    let bench = Bench::new();
    let config = IommuConfig::parse(&bench.device.config()).unwrap();
    assert_eq!(config.page_sizes, PageSizes::X86);
    assert_eq!(config.input_range, Range::ALL);
    assert_eq!(config.probe_size, 512);
    let mut out = [0; 50];
    bench.device.read_config(4, &mut out);
    assert_eq!(out[..36], bench.device.config()[4..]);
    assert_eq!(out[36..], [0; 14]);
}

/// A step of a random driver. Few numbers, so that requests meet.
fn step() -> impl Strategy<Value = Request> {
    let pages = (0u64..24, 0u64..6)
        .prop_map(|(first, more)| range(first << 12, ((first + more) << 12) + 0xfff));
    let domain = 1u32..4;
    let endpoint = prop_oneof![1u32..4, Just(8), Just(9)];
    prop_oneof![
        2 => (domain.clone(), endpoint.clone(), 0u32..8).prop_map(|(domain, endpoint, flags)| {
            let flags = AttachFlags::from_bits_truncate(u32::from(flags == 0));
            Request::Attach { domain, endpoint, flags }
        }),
        1 => (domain.clone(), endpoint)
            .prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
        8 => (domain.clone(), pages.clone(), 1u64..1000, 0u32..4).prop_map(
            |(domain, range, phys, flags)| {
                let flags = MapFlags::from_bits_truncate(flags);
                Request::Map(MapRequest { domain, range, phys: phys << 12, flags })
            }
        ),
        6 => (domain, pages)
            .prop_map(|(domain, range)| Request::Unmap(UnmapRequest { domain, range })),
    ]
}

/// A domain's number, whether it is a bypass domain, its mappings.
type OracleDomain = (u32, bool, Vec<(Range, u64, MapFlags)>);

/// The device as a list: slow and plain.
#[derive(Default)]
struct Oracle {
    domains: Vec<OracleDomain>,
    attached: Vec<(u32, u32)>,
}

impl Oracle {
    fn reserved(endpoint: u32) -> &'static [(u64, u64)] {
        if endpoint == 8 { &[(0, 0xffff), RESERVED] } else { &[] }
    }

    fn leave(&mut self, endpoint: u32) {
        self.attached.retain(|&(held, _)| held != endpoint);
        let attached = &self.attached;
        self.domains.retain(|&(id, ..)| attached.iter().any(|&(_, domain)| domain == id));
    }

    fn apply(&mut self, request: Request) -> Status {
        match request {
            Request::Attach { domain, endpoint, flags } => {
                if endpoint == 9 {
                    return Status::NoEnt;
                }
                let bypass = !flags.is_empty();
                let found = self.domains.iter().find(|&&(id, ..)| id == domain);
                if let Some((_, of, mappings)) = found {
                    if *of != bypass {
                        return Status::Inval;
                    }
                    if self.attached.contains(&(endpoint, domain)) {
                        return Status::Ok;
                    }
                    let mut regions = Self::reserved(endpoint).iter().map(|&(a, b)| range(a, b));
                    if regions.any(|region| mappings.iter().any(|(at, ..)| at.overlaps(region))) {
                        return Status::Unsupp;
                    }
                } else {
                    self.domains.push((domain, bypass, Vec::new()));
                }
                self.attached.push((endpoint, domain));
                let to = self.attached.pop().unwrap();
                self.attached.retain(|&(held, _)| held != endpoint);
                self.attached.push(to);
                let attached = &self.attached;
                self.domains.retain(|&(id, ..)| attached.iter().any(|&(_, domain)| domain == id));
                Status::Ok
            }
            Request::Detach { domain, endpoint } => {
                if endpoint == 9 {
                    return Status::NoEnt;
                }
                if !self.attached.contains(&(endpoint, domain)) {
                    return Status::Inval;
                }
                self.leave(endpoint);
                Status::Ok
            }
            Request::Map(MapRequest { domain, range: wanted, phys, flags }) => {
                let members = self.attached.iter().filter(|&&(_, d)| d == domain);
                let reserved: Vec<_> = members.flat_map(|&(e, _)| Self::reserved(e)).collect();
                match self.domains.iter_mut().find(|&&mut (id, ..)| id == domain) {
                    None => Status::NoEnt,
                    Some((_, true, _)) => Status::Inval,
                    Some((_, _, mappings)) => {
                        if flags.is_empty()
                            || reserved.iter().any(|&&(a, b)| range(a, b).overlaps(wanted))
                            || mappings.iter().any(|(held, ..)| held.overlaps(wanted))
                        {
                            return Status::Inval;
                        }
                        mappings.push((wanted, phys, flags));
                        Status::Ok
                    }
                }
            }
            Request::Unmap(UnmapRequest { domain, range: wanted }) => {
                match self.domains.iter_mut().find(|&&mut (id, ..)| id == domain) {
                    None => Status::NoEnt,
                    Some((_, true, _)) => Status::Inval,
                    Some((_, _, mappings)) => {
                        let split = |held: Range| held.overlaps(wanted) && !wanted.covers(held);
                        if mappings.iter().any(|&(held, ..)| split(held)) {
                            return Status::Range;
                        }
                        mappings.retain(|(held, ..)| !held.overlaps(wanted));
                        Status::Ok
                    }
                }
            }
            Request::Probe { .. } => Status::Ok,
            Request::IotlbFlush { .. } => unreachable!("not on offer, and never sent"),
        }
    }

    fn access(&self, endpoint: u32, iova: u64, access: Prot) -> Option<u64> {
        let &(_, domain) = self.attached.iter().find(|&&(held, _)| held == endpoint)?;
        let (_, bypass, mappings) = self.domains.iter().find(|&&(id, ..)| id == domain)?;
        if *bypass {
            return Some(iova);
        }
        let (held, phys, flags) = mappings.iter().find(|(held, ..)| held.contains(Iova(iova)))?;
        flags.allows(access).then(|| phys + iova - held.first().0)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_order_of_requests_ends_as_in_the_oracle(
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut bench = Bench::new();
        let mut oracle = Oracle::default();
        for request in steps {
            prop_assert_eq!(bench.send(request), oracle.apply(request), "{:?}", request);
        }
        for endpoint in [1, 2, 3, 8] {
            for page in 0..30 {
                for access in [Prot::READ, Prot::WRITE] {
                    let iova = (page << 12) + 0x123;
                    prop_assert_eq!(
                        bench.endpoints.access(endpoint, iova, access),
                        oracle.access(endpoint, iova, access)
                    );
                }
            }
        }
    }

    #[test]
    fn no_bytes_harm_the_device(
        requests in proptest::collection::vec(
            (0u8..7, proptest::collection::vec(prop_oneof![0u8..4, any::<u8>()], 0..80), 0usize..20),
            1..20,
        ),
    ) {
        let mut bench = Bench::new();
        for (kind, mut bytes, room) in requests {
            if let Some(first) = bytes.first_mut() {
                *first = kind;
            }
            let (used, reply) = bench.raw(&bytes, room);
            prop_assert!(used <= reply.len());
        }
    }
}
