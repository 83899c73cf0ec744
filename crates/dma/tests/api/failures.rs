//! Failures are undone, or quarantined.

use std::sync::atomic::Ordering;

use ringfence_dma::{
    Device, Direction, DmaConfig, Error, ErrorKind, FlushTuning, MapError, Policy, QueueKind,
    SetupError, TuningError,
};
use ringfence_iommu::{Capabilities, Error as DomainError, Iova, table::Limits};
use ringfence_iova::{AllocError, AllocReason, Request};

use crate::mock::{Bench, Broken, Buf, EagerAllocator, Event, MSI, MockDomain, STATUS, Setup};

const MAPPING: [Policy; 6] = [
    Policy::Strict,
    Policy::StrictMap,
    Policy::LazySq,
    Policy::LazyMq,
    Policy::LazySqMap,
    Policy::LazyMqMap,
];

/// Three pieces that need three map calls.
fn buffer() -> Buf {
    Buf::new(&[(0x1000, 0x1000), (0x4000, 0x1000), (0x9000, 0x1800)])
}

fn is_device_status(error: Error) -> bool {
    matches!(error, Error::Domain(DomainError::Device { status: STATUS, .. }))
}

#[test]
fn a_map_that_fails_at_any_step_is_undone_and_reports_the_devices_status() {
    // rules L29, L33, L34
    for policy in MAPPING {
        let mut failed = 0;
        for step in 0.. {
            let bench = Bench::new(policy);
            let buffer = buffer();
            let drops = buffer.drops();
            bench.domain.fail_after(step);
            let result = bench.device.map(buffer, Direction::ToDevice);
            if bench.domain.failure_pending() {
                drop(result);
                break;
            }
            failed += 1;
            let error = result.unwrap_err();
            assert!(is_device_status(error.error()), "{error}");
            bench.assert_nothing_leaked();
            let stats = bench.device.stats();
            assert_eq!((stats.queued, stats.quarantined, stats.flushes), (0, 0, 0));
            assert_eq!((stats.maps, stats.map_failures), (0, 1));
            let buffer = error.into_buffer().expect("it was undone");
            assert_eq!(drops.load(Ordering::Relaxed), 0);
            // The device still works.
            bench.domain.fail_after(i64::MAX);
            drop(bench.device.map(buffer, Direction::ToDevice).unwrap());
            bench.device.flush().unwrap();
            bench.assert_nothing_leaked();
        }
        assert_eq!(failed, if policy.batches_maps() { 4 } else { 6 }, "{policy}");
    }
}

#[test]
fn undoing_a_map_invalidates_before_its_iova_is_free() {
    // rules L17, L29
    for policy in MAPPING {
        let bench = Bench::new(policy);
        bench.domain.fail_after(if policy.batches_maps() { 3 } else { 5 });
        drop(bench.device.map(buffer(), Direction::ToDevice).unwrap_err());
        let events = bench.domain.events();
        let tail = &events[events.len() - 3..];
        assert!(
            matches!(
                tail,
                [Event::Unmap { queued: false, .. }, Event::Sync, Event::Free(_, 0x4000)]
            ),
            "{tail:?}"
        );
    }
}

#[test]
fn a_map_that_cannot_be_undone_keeps_the_buffer_and_its_iova() {
    for broken in
        [Broken { unmap: true, ..Broken::default() }, Broken { sync: true, ..Broken::default() }]
    {
        for policy in MAPPING {
            let bench = Bench::new(policy);
            let buffer = buffer();
            let drops = buffer.drops();
            *bench.domain.broken.lock().unwrap() = broken;
            bench.domain.fail_after(if policy.batches_maps() { 3 } else { 5 });
            let error: MapError<Buf> = bench.device.map(buffer, Direction::ToDevice).unwrap_err();
            assert!(error.to_string().contains("quarantined"), "{error}");
            assert!(is_device_status(error.error()));
            assert!(error.into_buffer().is_none());
            assert_eq!(drops.load(Ordering::Relaxed), 0, "the device may still reach the buffer");
            let stats = bench.device.stats();
            assert_eq!((stats.quarantined, stats.quarantined_bytes), (1, 0x4000));
            assert_eq!(bench.allocator.live(), 1, "its IOVA is not free");
        }
    }
}

#[test]
fn an_unmap_whose_invalidation_fails_keeps_the_buffer_and_its_iova() {
    for broken in
        [Broken { unmap: true, ..Broken::default() }, Broken { sync: true, ..Broken::default() }]
    {
        for policy in [Policy::Strict, Policy::StrictMap] {
            let bench = Bench::new(policy);
            let buffer = Buf::new(&[(0x1000, 0x1000)]);
            let drops = buffer.drops();
            let mapping = bench.device.map(buffer, Direction::ToDevice).unwrap();
            let iova = mapping.iova();
            *bench.domain.broken.lock().unwrap() = broken;
            let error = mapping.unmap().unwrap_err();
            assert_eq!(error.quarantined.first(), iova);
            assert!(matches!(error.error(), DomainError::Device { status: STATUS, .. }));
            assert!(bench.domain.reach(iova.0).is_some(), "it is still reachable indeed");
            let _ = error;
            assert_eq!(drops.load(Ordering::Relaxed), 0);
            *bench.domain.broken.lock().unwrap() = Broken::default();
            let other = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice);
            let other = other.unwrap();
            assert_ne!(other.iova(), iova);
            let stats = bench.device.stats();
            assert_eq!((stats.unmap_failures, stats.quarantined, stats.unmaps), (1, 1, 0));
        }
    }
}

#[test]
fn a_drop_whose_invalidation_fails_leaks_the_buffer() {
    let bench = Bench::new(Policy::StrictMap);
    let buffer = Buf::new(&[(0x1000, 0x1000)]);
    let drops = buffer.drops();
    let mapping = bench.device.map(buffer, Direction::ToDevice).unwrap();
    bench.domain.fail_after(1);
    drop(mapping);
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    assert_eq!((bench.device.stats().quarantined, bench.allocator.live()), (1, 1));
}

#[test]
fn the_buffer_can_be_taken_out_of_the_error_if_the_device_is_gone() {
    let bench = Bench::new(Policy::StrictMap);
    let mapping = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap();
    bench.domain.fail_after(1);
    let error = mapping.unmap().unwrap_err();
    // SAFETY: there is no device and no memory.
    let buffer = unsafe { error.into_buffer() };
    assert_eq!(buffer.pieces, [(0x1000, 0x1000)]);
}

#[test]
fn an_exhausted_address_space_and_a_full_domain_are_different_errors() {
    let mut setup = Setup::new(Policy::StrictMap);
    setup.config.limit = Iova(0x10_0fff);
    let bench = setup.build();
    let one = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap();
    let error = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddressSpace);
    let (size, limit, live_ranges, live_bytes) = (0x1000, 0x10_0fff, 1, 0x1000);
    assert_eq!(error.error(), Error::Exhausted { size, limit, live_ranges, live_bytes });
    assert_eq!(
        error.to_string(),
        "cannot map: no I/O virtual addresses are free for 0x1000 bytes at or below 0x100fff: 1 \
         ranges are live, 0x1000 bytes are taken; unmap something, or raise DmaConfig::limit"
    );
    assert!(error.into_buffer().is_some());
    drop(one);
    bench.assert_nothing_leaked();

    let mut setup = Setup::new(Policy::StrictMap);
    setup.limits = Limits { mappings: 2, ..Limits::NONE };
    let bench = setup.build();
    let error = bench.device.map(buffer(), Direction::ToDevice).unwrap_err();
    assert!(matches!(error.error(), Error::Domain(DomainError::Full { limit: 2, .. })));
    assert_eq!(error.kind(), ErrorKind::DomainFull);
    bench.assert_nothing_leaked();
}

#[test]
fn an_errors_kind_is_what_it_means_for_the_caller() {
    // rule L47
    let bench = Bench::new(Policy::StrictMap);
    let kind = |error: MapError<Buf>| error.kind();
    let map = |bench: &Bench| bench.device.map(buffer(), Direction::ToDevice);
    bench.domain.fail_after(3);
    assert_eq!(kind(map(&bench).unwrap_err()), ErrorKind::Device { status: STATUS });
    let empty = bench.device.map(Buf::new(&[]), Direction::ToDevice).unwrap_err();
    assert_eq!(empty.kind(), ErrorKind::Invalid);
    let mapping = map(&bench).unwrap();
    bench.domain.fail_after(1);
    assert_eq!(mapping.unmap().unwrap_err().kind(), ErrorKind::Device { status: STATUS });
    // An impossible request is not a matter of waiting.
    let error = Error::NoIova(AllocError {
        request: Request::new(0x2000).limit(0xfff),
        reason: AllocReason::ApertureTooSmall { first: 0x1000, last: 0xfff },
    });
    assert_eq!(error.kind(), ErrorKind::Invalid);
    // A flush that failed is.
    let (request, reason) = (Request::new(0x2000), AllocReason::FlushFailed);
    let error = Error::NoIova(AllocError { request, reason });
    assert_eq!(error.kind(), ErrorKind::AddressSpace);
    for (error, wanted) in [
        (DomainError::Gone("unplugged"), ErrorKind::Gone),
        (DomainError::NoMemory { operation: "map", range: MSI }, ErrorKind::NoMemory),
        (DomainError::Full { what: "mappings", used: 2, limit: 2 }, ErrorKind::DomainFull),
        (DomainError::NoPermission(MSI), ErrorKind::Invalid),
    ] {
        assert_eq!(Error::from(error).kind(), wanted);
        assert_eq!(ErrorKind::of(&error), wanted);
    }
}

#[test]
fn a_lazy_device_flushes_before_it_reports_that_no_iova_is_left() {
    // rule L19
    let mut setup = Setup::new(Policy::LazySqMap);
    setup.config.limit = Iova(0x10_0fff);
    let bench = setup.build();
    for n in 1..=3 {
        let mapping = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap();
        drop(mapping);
        assert_eq!(bench.device.stats().flushes, n - 1);
    }
    // A flush does not release what is mapped rather than queued.
    let held = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap();
    let error = bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap_err();
    assert!(matches!(error.error(), Error::Exhausted { .. }));
    drop(held);
}

#[test]
fn an_invalid_configuration_is_refused() {
    let device = |config: DmaConfig| {
        let domain = MockDomain::new(4096, Capabilities::FULL, Limits::NONE);
        let allocator = EagerAllocator::new(4096, domain.log.clone());
        Device::builder(domain).allocator(allocator).config(config).build().map(|_| ()).unwrap_err()
    };
    let (config, granule) = (DmaConfig::default, 4096);
    assert_eq!(
        device(DmaConfig { segment_boundary: 0x1_0000, ..config() }),
        SetupError::Boundary { boundary: 0x1_0000, granule }
    );
    assert_eq!(
        device(DmaConfig { segment_boundary: 0x7ff, ..config() }),
        SetupError::Boundary { boundary: 0x7ff, granule }
    );
    let max_segment = 4095;
    let refused = SetupError::MaxSegment { max_segment, granule };
    assert_eq!(device(DmaConfig { max_segment, ..config() }), refused);
    assert_eq!(device(DmaConfig { sample_every: 3, ..config() }), SetupError::SampleEvery(3));
    let tuning = FlushTuning { slots: 1, ..FlushTuning::default() };
    assert_eq!(
        device(DmaConfig { flush: Some(tuning), ..config() }),
        SetupError::Tuning(TuningError::Slots(1))
    );
    let policy = Policy::LazyMq;
    assert_eq!(
        device(DmaConfig { flush: Some(FlushTuning::default()), ..DmaConfig::new(policy) }),
        SetupError::Tuning(TuningError::Kind { kind: QueueKind::Single, policy })
    );
    let domain = MockDomain::new(8192, Capabilities::FULL, Limits::NONE);
    let allocator = EagerAllocator::new(4096, domain.log.clone());
    assert_eq!(
        Device::builder(domain)
            .allocator(allocator)
            .config(config())
            .build()
            .map(|_| ())
            .unwrap_err(),
        SetupError::Granule { allocator: 4096, domain: 8192 }
    );
}
