//! Buffers in pool memory, and slots that outlive what they were for.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use ringfence_dma::{BounceConfig, BounceLimits, Device, Direction, Error, Policy, Written};
use ringfence_iommu::Error as DomainError;

use crate::{
    bounced::{DIRECTIONS, bounce, filled, setup},
    mock::{STATUS, Setup},
    ram::{END, Pooled},
};

#[test]
fn what_was_read_of_a_taken_buffer_stays_what_it_is_whatever_the_device_writes() {
    let pooled = bounce(Written::Unknown);
    let mut taken = pooled.bench.device.take_buffer(0x300, Direction::Bidirectional).unwrap();
    taken.write(0x2fb, b"plain");
    let mut bytes = [0; 5];
    taken.read(0x2fb, &mut bytes);
    let text = str::from_utf8(&bytes).unwrap();
    assert!(pooled.device_writes(taken.iova().0 + 0x2fb, &[0xff; 5]));
    assert_eq!(text, "plain");
    assert_eq!(taken.piece().part(0x2fb, 9).to_vec(), [0xff; 5], "the buffer itself has changed");
    let past = catch_unwind(AssertUnwindSafe(|| taken.read(0x2fc, &mut [0; 5])));
    assert!(past.is_err(), "past its end is the rest of the slot");
}

#[test]
fn a_taken_buffer_is_exposed_and_counted_and_shows_nothing_beyond_its_end() {
    let pooled = bounce(Written::Unknown);
    let device = &pooled.bench.device;
    let long = filled(&pooled, &[(0x5000, 0x1000)], 0xaa);
    drop(device.map(long, Direction::Bidirectional).unwrap());
    let taken = device.take_buffer(0x300, Direction::Bidirectional).unwrap();
    assert_eq!((device.stats().taken, device.stats().taken_bytes), (1, 0x300));
    assert_eq!(taken.len(), 0x300);
    assert_eq!(taken.segments().iter().map(|s| s.len).sum::<u64>(), 0x300);
    let iova = taken.iova().0;
    assert_eq!(pooled.device_reads(iova + 0x300, 0xd00), Some(vec![0; 0xd00]));
    taken.piece().fill(7);
    assert_eq!(pooled.device_reads(iova, 0x300), Some(vec![7; 0x300]));
    assert!(pooled.device_writes(iova + 1, &[8]));
    let mut bytes = [0; 3];
    taken.read(0, &mut bytes);
    assert_eq!(bytes, [7, 8, 7]);
    drop(taken);
    assert_eq!((device.stats().taken, device.stats().taken_bytes), (0, 0));
    // The next mapping sees none of it.
    let next = device.map(filled(&pooled, &[(0x9000, 1)], 1), Direction::Bidirectional).unwrap();
    assert_eq!(next.iova().0, iova);
    assert_eq!(pooled.device_reads(iova, 0x1000), Some([vec![1], vec![0; 0xfff]].concat()));
    drop(next);
    for direction in DIRECTIONS {
        let taken = device.take_buffer(1, direction).unwrap();
        assert_eq!(pooled.bench.domain.reach(taken.iova().0).unwrap().1, direction.prot());
    }
    assert!(matches!(device.take_buffer(0, Direction::ToDevice), Err(Error::Empty)));
    assert!(device.take_buffer(u64::MAX, Direction::ToDevice).is_err());
    assert!(device.take_buffer(END, Direction::ToDevice).is_err());
    pooled.assert_no_slot_is_lost();
}

#[test]
fn a_device_that_is_off_has_no_slots_to_give() {
    let pooled = Pooled::new(Setup::new(Policy::Off));
    let device = &pooled.bench.device;
    let error = device.take_buffer(1, Direction::ToDevice).unwrap_err();
    assert!(error.to_string().contains("another policy than off"), "{error}");
    let mapping = device.map(filled(&pooled, &[(0x5100, 1)], 5), Direction::ToDevice).unwrap();
    assert_eq!((mapping.iova().0, mapping.is_bounced()), (0x5100, false));
    drop(mapping);
    pooled.assert_no_slot_is_lost();
}

#[test]
fn a_watched_slot_is_not_reused_while_it_is_watched() {
    for batched in [false, true] {
        let pooled = bounce(Written::Unknown);
        let device = &pooled.bench.device;
        let map = |at| {
            let list = vec![filled(&pooled, &[(at, 0x100)], 5)];
            device.map(list, Direction::ToDevice).unwrap()
        };
        let mapping = map(0x5000);
        let iova = mapping.iova();
        let stale = if batched {
            let mut batch = device.unmap_batch();
            batch.push_watched(mapping, ()).unwrap();
            let mut stale = None;
            batch.finish(|(), returned| stale = returned.unwrap().stale);
            stale.unwrap()
        } else {
            mapping.unmap_watched().unwrap().1
        };
        assert_eq!((stale.iova(), stale.range()), (iova, None));
        assert_eq!(pooled.pools.stats().slots, 1, "parked");
        let other = map(0x6000);
        assert_ne!(other.iova(), iova);
        drop(stale);
        assert_eq!(map(0x7000).iova(), iova, "free again");
        drop(other);
        pooled.assert_no_slot_is_lost();
    }
}

#[test]
fn a_batch_that_fails_loses_no_slot_and_harms_no_copy() {
    // rules L34, L50
    for fail in [true, false] {
        let pooled = Pooled::new(setup(Policy::Bounce, |config| {
            config.bounce = BounceConfig { threshold: 0x1000, ..BounceConfig::default() };
        }));
        let device = &pooled.bench.device;
        // So that there is a slot.
        drop(device.map(filled(&pooled, &[(0x5000, 0x100)], 5), Direction::ToDevice).unwrap());
        let mut batch = device.map_batch();
        let buffers = [(0x5000, 0x100), (0x9000, 0x2000)];
        for (n, piece) in buffers.into_iter().enumerate() {
            batch.push(filled(&pooled, &[piece], 5), Direction::ToDevice, n).unwrap();
        }
        if fail {
            pooled.bench.domain.fail_after(0);
        }
        let mut outcomes = Vec::new();
        batch.finish(|n, mapping| outcomes.push((n, mapping)));
        let (copy, mapped) = (&outcomes[0].1, &outcomes[1].1);
        assert!(copy.as_ref().unwrap().is_bounced());
        match mapped {
            Ok(mapped) => assert!(!fail && !mapped.is_bounced()),
            Err(error) => assert!(
                fail && matches!(
                    error.error(),
                    Error::Domain(DomainError::Device { status: STATUS, .. })
                )
            ),
        }
        drop((outcomes, batch));
        pooled.assert_no_slot_is_lost();
    }
}

#[test]
fn a_copy_outlives_a_change_of_the_policy() {
    // rules L17, L27
    for policy in Policy::ALL.into_iter().filter(|policy| *policy != Policy::Off) {
        let pooled = bounce(Written::Unknown);
        let device = &pooled.bench.device;
        let map =
            |at| device.map(filled(&pooled, &[(at, 0x100)], 5), Direction::Bidirectional).unwrap();
        let (one, batched) = (map(0x5000), map(0x6000));
        for mapping in [&one, &batched] {
            assert!(pooled.device_writes(mapping.iova().0, &[6; 0x80]));
        }
        device.set_policy(policy).unwrap();
        let wanted = [vec![6; 0x80], vec![5; 0x80]].concat();
        assert_eq!(one.unmap().unwrap().bytes(), wanted, "{policy}");
        let mut batch = device.unmap_batch();
        batch.push(batched, ()).unwrap();
        batch.finish(|(), returned| assert_eq!(returned.unwrap().buffer.bytes(), wanted));
        drop(batch);
        assert_eq!((device.stats().queued, device.stats().unmaps), (0, 2));
        pooled.assert_no_slot_is_lost();
    }
}

#[test]
fn a_taken_buffer_never_holds_another_devices_bytes() {
    // One slot at a time, so that each device gets the other's last slot.
    let pooled = Pooled::with(setup(Policy::Bounce, |_| ()), BounceLimits::default(), 0x1000);
    let other = Device::builder(Arc::clone(&pooled.bench.domain))
        .allocator(Arc::clone(&pooled.bench.allocator))
        .config(setup(Policy::Bounce, |_| ()).config)
        .pools(&pooled.pools)
        .build()
        .unwrap();
    for direction in DIRECTIONS {
        // What one device's driver left, from a mapping and from a taken buffer.
        let buffer = filled(&pooled, &[(0x5000, 0x1000)], 0xaa);
        drop(pooled.bench.device.map(buffer, direction).unwrap());
        let mut taken = pooled.bench.device.take_buffer(0x1000, direction).unwrap();
        taken.write(0, &[0xab; 0x1000]);
        drop(taken);
        // The other's driver finds none of it.
        let taken = other.take_buffer(0x800, direction).unwrap();
        assert!(taken.piece().to_vec().iter().all(|&byte| byte == 0), "{direction:?}");
        let slot = pooled.bench.domain.reach(taken.iova().0).unwrap().0;
        assert_eq!(pooled.ram.read(slot, 0x1000), [0; 0x1000], "{direction:?}");
        drop(taken);
        pooled.pools.trim();
    }
    drop(other);
    pooled.assert_no_slot_is_lost();
}
