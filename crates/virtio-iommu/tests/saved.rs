//! A device that moves: what is restored is what was saved, and nothing that is not legal.

mod common;

use common::{Bench, range};
use proptest::prelude::*;
use ringfence_iommu::{Prot, table::Limits};
use ringfence_virtio_iommu::{
    device::{DeviceConfig, RestoreError},
    wire::{Features, MapFlags, MapRequest, Request, Status},
};

/// A device with a domain of two members, one that bypasses, and one that is empty.
fn worked() -> Bench {
    let mut bench = Bench::new();
    for (domain, endpoint) in [(7, 1), (7, 8), (u32::MAX, 3)] {
        assert_eq!(bench.attach(domain, endpoint), Status::Ok);
    }
    assert_eq!(bench.attach_bypass(2, 2), Status::Ok);
    for n in 0..1000 {
        let at = range((n << 21) + 0x10_0000, (n << 21) + 0x10_0fff + ((n % 3) << 12));
        let flags = MapFlags::READ | if n % 2 == 0 { MapFlags::WRITE } else { MapFlags::MMIO };
        let request = Request::Map(MapRequest { domain: 7, range: at, phys: n << 13, flags });
        assert_eq!(bench.send(request), Status::Ok);
    }
    bench.device.write_config(36, &[1]).unwrap();
    bench
}

#[test]
fn a_device_that_moved_behaves_as_the_one_it_was() {
    let mut bench = worked();
    let saved = bench.device.save().unwrap();
    let mut moved = Bench::new();
    moved.device.set_features(0);
    moved.device.restore(&saved).unwrap();
    assert_eq!(moved.device.save().unwrap(), saved);
    for endpoint in [1, 2, 3, 8] {
        for n in 0..1000 {
            for at in [n << 21, (n << 21) + 0x10_0123, (n << 21) + 0x10_2123] {
                for access in [Prot::READ, Prot::WRITE] {
                    assert_eq!(
                        moved.endpoints.access(endpoint, at, access),
                        bench.endpoints.access(endpoint, at, access)
                    );
                }
            }
        }
    }
    // Boundaries, members and `bypass` too.
    for bench in [&mut bench, &mut moved] {
        assert_eq!(bench.unmap(7, range((2 << 21) + 0x10_1000, u64::MAX)), Status::Range);
        assert_eq!(bench.unmap(7, range((2 << 21) + 0x10_0000, u64::MAX)), Status::Ok);
        assert_eq!(bench.map(7, range(0, 0xfff), 0), Status::Inval, "reserved for endpoint 8");
        assert_eq!(bench.detach(7, 1), Status::Ok);
        assert_eq!(bench.reads(1, 0x1234), Some(0x1234));
        assert_eq!(bench.reads(8, 0x10_0000), Some(0));
        assert_eq!(bench.device.domains(), 3);
    }
}

fn restored(bytes: &[u8], options: DeviceConfig, limits: Limits) -> Result<(), RestoreError> {
    let bench = Bench::with(options, limits);
    let result = bench.device.restore(bytes);
    if result.is_err() {
        assert_eq!(bench.device.domains(), 0);
        for endpoint in [1, 2, 3, 8] {
            assert_eq!(bench.reads(endpoint, 0x10_0000), None, "nothing is attached");
        }
        assert_eq!(bench.device.config()[36], 0);
    }
    result
}

#[test]
fn a_device_that_is_another_takes_nothing_over() {
    let saved = worked().device.save().unwrap();
    let plain = DeviceConfig::default;
    assert_eq!(restored(&saved, plain(), Limits::NONE), Ok(()));
    let features = plain().features.difference(Features::MMIO);
    let differs = |what| Err(RestoreError::Differs(what));
    let options = DeviceConfig { features, ..plain() };
    assert_eq!(restored(&saved, options, Limits::NONE), differs("its features"));
    for options in [
        DeviceConfig { input_range: range(0, 1 << 40), ..plain() },
        DeviceConfig { domain_range: (0, 7), ..plain() },
        DeviceConfig { probe_size: 256, ..plain() },
    ] {
        assert_eq!(restored(&saved, options, Limits::NONE), differs("its configuration"));
    }
    let refused = |domain, status| Err(RestoreError::Refused { domain, status });
    let options = DeviceConfig { max_domains: 2, ..plain() };
    assert_eq!(restored(&saved, options, Limits::NONE), refused(u32::MAX, Status::NoMem));
    let limits = Limits { mappings: 999, ..Limits::NONE };
    assert_eq!(restored(&saved, plain(), limits), refused(7, Status::NoMem));
    let bench = worked();
    assert_eq!(bench.device.restore(&saved), Err(RestoreError::InUse));
    assert_eq!(bench.device.domains(), 3);
}

/// Bytes with the checksum that they should have.
fn signed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - 8;
    let step = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let sum = bytes[..end].iter().fold(0xcbf2_9ce4_8422_2325, step);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn another_version_and_bytes_that_are_lost_or_changed_are_found_out() {
    let saved = worked().device.save().unwrap();
    let none = || (DeviceConfig::default(), Limits::NONE);
    let try_it = |bytes: &[u8]| restored(bytes, none().0, none().1);
    let mut other = saved.clone();
    other[4] = 9;
    assert_eq!(try_it(&signed(other)), Err(RestoreError::Version(9)));
    for len in [0, 7, 8, 50, 100, saved.len() - 1] {
        assert!(matches!(try_it(&saved[..len]), Err(RestoreError::Format(_))), "{len}");
    }
    for at in [0, 60, 1000, saved.len() - 9, saved.len() - 1] {
        let mut changed = saved.clone();
        changed[at] ^= 0x10;
        assert!(matches!(try_it(&changed), Err(RestoreError::Format(_))), "{at}");
    }
    let mut longer = saved.clone();
    longer.extend([0; 8]);
    assert_eq!(try_it(&signed(longer)), Err(RestoreError::Format("something follows")));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Forged, with a valid checksum: whatever is taken over is legal.
    #[test]
    fn forged_bytes_do_no_harm(changes in proptest::collection::vec((0usize..400, any::<u8>()), 0..6)) {
        let mut bench = Bench::new();
        prop_assert_eq!(bench.attach(1, 1), Status::Ok);
        prop_assert_eq!(bench.attach_bypass(2, 2), Status::Ok);
        for n in 0..4 {
            prop_assert_eq!(bench.map(1, range(n << 14, (n << 14) + 0xfff), 0), Status::Ok);
        }
        let mut bytes = bench.device.save().unwrap();
        let len = bytes.len();
        for (at, to) in changes {
            bytes[at % len] = to;
        }
        let moved = Bench::with(DeviceConfig::default(), Limits { mappings: 100, table_bytes: 1 << 16 });
        if moved.device.restore(&signed(bytes)).is_ok() {
            // Saved again, the state is the same.
            let again = moved.device.save().unwrap();
            let third = Bench::new();
            prop_assert_eq!(third.device.restore(&again), Ok(()));
            prop_assert_eq!(third.device.save().unwrap(), again);
        } else {
            prop_assert_eq!(moved.device.domains(), 0);
        }
    }
}
