//! Mappings that are copies: which ones, what the device sees, what comes back.

use ringfence_dma::{
    BounceLimits, Direction, Distrust, DmaConfig, Error, Mapping, Policy, Trust, Written,
};
use ringfence_iommu::Prot;

use crate::{
    mock::{Buf, Event, Setup},
    ram::{Pooled, RamBuf, SLOTS},
};

const UNTRUSTED: Trust = Trust::Untrusted { why: Distrust::Described };
pub(crate) const DIRECTIONS: [Direction; 3] =
    [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];

pub(crate) fn setup(policy: Policy, change: impl FnOnce(&mut DmaConfig)) -> Setup {
    let mut setup = Setup::new(policy);
    change(&mut setup.config);
    setup
}

pub(crate) fn bounce(written: Written) -> Pooled {
    Pooled::new(setup(Policy::Bounce, |config| config.bounce.written = written))
}

fn untrusted(policy: Policy) -> Pooled {
    Pooled::new(setup(policy, |config| config.trust = UNTRUSTED))
}

/// A buffer filled with `byte`, with neighbours of 0x77.
pub(crate) fn filled(pooled: &Pooled, pieces: &[(u64, u64)], byte: u8) -> RamBuf {
    for &(addr, len) in pieces {
        pooled.ram.write(addr & !0xfff, &vec![0x77; (len as usize).next_multiple_of(4096) + 4096]);
    }
    pieces.iter().for_each(|&(addr, len)| pooled.ram.write(addr, &vec![byte; len as usize]));
    pooled.ram.buffer(pieces)
}

/// What the device reads of the slot beyond a mapping's `len` bytes, to the end of its last
/// granule.
fn beyond<B>(pooled: &Pooled, mapping: &Mapping<B>, len: u64) -> Vec<u8> {
    let end = len.next_multiple_of(4096);
    pooled.device_reads(mapping.iova().0 + len, end - len).unwrap()
}

#[test]
fn an_untrusted_device_never_sees_what_lies_beside_a_buffer() {
    // rules L48, L43
    for policy in Policy::ALL {
        for direction in DIRECTIONS {
            let pooled = untrusted(policy);
            let device = &pooled.bench.device;
            // Neither the beginning nor the end, then only one of them, lies on a granule boundary.
            for (addr, len) in [(0x5100, 0x300), (0x5000, 0x300), (0x5100, 0xf00), (0x5800, 0x1000)]
            {
                let mapping = device.map(filled(&pooled, &[(addr, len)], 1), direction).unwrap();
                assert!(mapping.is_bounced(), "{policy} {direction:?} {addr:#x}");
                let iova = mapping.iova().0;
                let prot = pooled.bench.domain.reach(iova).unwrap().1;
                assert_eq!(prot, direction.prot());
                assert_eq!(mapping.segments().iter().map(|s| s.len).sum::<u64>(), len);
                if direction == Direction::FromDevice {
                    assert_eq!(pooled.device_reads(iova, 1), None, "it may not read");
                } else {
                    assert_eq!(pooled.device_reads(iova, len), Some(vec![1; len as usize]));
                    assert!(beyond(&pooled, &mapping, len).iter().all(|&byte| byte == 0));
                }
                assert_eq!(pooled.device_writes(iova, &[2]), direction != Direction::ToDevice);
                // The buffer's own memory is not mapped anywhere.
                assert!(pooled.bench.domain.cached().iter().all(|(_, target, _)| *target >= SLOTS));
                drop(mapping.unmap().unwrap());
            }
            assert_eq!((device.stats().bounced, device.stats().not_bounced), (4, 0));
            pooled.assert_no_slot_is_lost();
        }
    }
}

#[test]
fn what_fills_its_granules_is_mapped_itself() {
    // rule L48
    for policy in [Policy::Strict, Policy::StrictMap] {
        let pooled = untrusted(policy);
        let pieces = [(0x5000, 0x1000), (0x9000, 0x2000), (0x7800, 0x800), (0x8000, 0x800)];
        // Unlike here, the last two are adjacent and fill a granule together.
        let mapping =
            pooled.bench.device.map(filled(&pooled, &pieces[..2], 1), Direction::ToDevice);
        assert!(!mapping.unwrap().is_bounced());
        let mapping =
            pooled.bench.device.map(filled(&pooled, &pieces[2..], 1), Direction::ToDevice);
        assert!(mapping.unwrap().is_bounced());
        let halves = [(0x7000, 0x800), (0x7800, 0x800)];
        let mapping = pooled.bench.device.map(filled(&pooled, &halves, 1), Direction::ToDevice);
        assert!(!mapping.unwrap().is_bounced(), "together they fill it");
        pooled.assert_no_slot_is_lost();
    }
    // On granules of 256 bytes, what fills those.
    let mut small = setup(Policy::Strict, |config| config.trust = UNTRUSTED);
    small.granule = 256;
    let pooled = Pooled::new(small);
    let map = |at, len| {
        pooled.bench.device.map(filled(&pooled, &[(at, len)], 1), Direction::ToDevice).unwrap()
    };
    assert!(!map(0x5100, 0x300).is_bounced());
    assert!(map(0x5110, 0x300).is_bounced());
    pooled.assert_no_slot_is_lost();
}

#[test]
fn a_list_with_one_piece_that_fits_ill_is_one_slot() {
    // rules L48, L44, L47
    let pooled = untrusted(Policy::StrictMap);
    let list: Vec<RamBuf> = [(0x5000u64, 0x1000u64), (0x9100, 0x80), (0xb000, 0x2000)]
        .iter()
        .zip(1..)
        .map(|(&piece, byte)| filled(&pooled, &[piece], byte))
        .collect();
    pooled.bench.domain.forget_events();
    let mapping = pooled.bench.device.map(list, Direction::Bidirectional).unwrap();
    assert!(mapping.is_bounced());
    assert_eq!(pooled.pools.stats().slots, 1);
    let (iova, len) = (mapping.iova().0, mapping.len());
    assert_eq!(mapping.segments(), [ringfence_dma::Segment { addr: iova, len }]);
    let bytes = [vec![1; 0x1000], vec![2; 0x80], vec![3; 0x2000]].concat();
    assert_eq!(pooled.device_reads(iova, len).unwrap(), bytes);
    assert!(beyond(&pooled, &mapping, len).iter().all(|&byte| byte == 0));
    // Each piece is copied back to its place.
    assert!(pooled.device_writes(iova + 0xff0, &[9; 0x100]));
    let list = mapping.unmap().unwrap();
    assert_eq!(list[0].bytes(), [vec![1; 0xff0], vec![9; 0x10]].concat());
    assert_eq!(list[1].bytes(), vec![9; 0x80]);
    assert_eq!(list[2].bytes(), [vec![9; 0x70], vec![3; 0x1f90]].concat());
    pooled.assert_no_slot_is_lost();
}

#[test]
fn where_it_is_not_known_what_was_written_the_rest_stays_as_it_was() {
    // rule L49
    let pooled = bounce(Written::Unknown);
    let mapping =
        pooled.bench.device.map(filled(&pooled, &[(0x5100, 0x1800)], 5), Direction::FromDevice);
    let mapping = mapping.unwrap();
    assert!(pooled.device_writes(mapping.iova().0 + 0x100, &[6; 0x20]));
    let buffer = mapping.unmap().unwrap();
    let wanted = [vec![5; 0x100], vec![6; 0x20], vec![5; 0x16e0]].concat();
    assert_eq!(buffer.bytes(), wanted);
    assert_eq!(pooled.ram.read(0x5000, 0x100), [0x77; 0x100], "its neighbours too");
    assert_eq!(pooled.ram.read(0x6900, 0x700), [0x77; 0x700]);
    assert_eq!(pooled.bench.device.stats().copied_bytes, 2 * 0x1800);
    pooled.assert_no_slot_is_lost();
}

#[test]
fn where_it_is_reported_that_alone_comes_back_and_nothing_was_preloaded() {
    // rule L49
    let pooled = bounce(Written::Reported);
    for noted in [0..0u64, 0..0x20, 0x10..0x18, 0..0x1800] {
        let buffer = filled(&pooled, &[(0x5100, 0x1800)], 5);
        let before = pooled.bench.device.stats().copied_bytes;
        let mut mapping = pooled.bench.device.map(buffer, Direction::FromDevice).unwrap();
        assert_eq!(pooled.bench.device.stats().copied_bytes, before, "nothing was loaded");
        let slot = pooled.bench.domain.reach(mapping.iova().0).unwrap().0;
        assert_eq!(
            pooled.ram.read(slot, 0x2000),
            [0; 0x2000],
            "nothing is left of its previous owner"
        );
        assert!(pooled.device_writes(mapping.iova().0, &[6; 0x1000]));
        mapping.note_written(noted.clone()).unwrap();
        let buffer = mapping.unmap().unwrap();
        for (n, byte) in (0u64..).zip(buffer.bytes()) {
            let wanted = match (noted.contains(&n), n < 0x1000) {
                (false, _) => 5,
                (true, true) => 6,
                (true, false) => 0,
            };
            assert_eq!(byte, wanted, "{noted:?}: byte {n:#x}");
        }
        assert_eq!(pooled.ram.read(slot, 0x2000), [0; 0x2000], "scrubbed");
    }
    pooled.assert_no_slot_is_lost();
}

#[test]
fn what_is_noted_twice_is_not_lost() {
    // rule L49
    for written in [Written::Unknown, Written::Reported] {
        for direction in [Direction::FromDevice, Direction::Bidirectional] {
            let pooled = bounce(written);
            let buffer = filled(&pooled, &[(0x5100, 0x400)], 5);
            let mut mapping = pooled.bench.device.map(buffer, direction).unwrap();
            assert!(pooled.device_writes(mapping.iova().0, &[6; 0x400]));
            // A range that grows, one that does not continue it, and one that overlaps both.
            for noted in [0..0x100, 0..0x180, 0x200..0x280, 0x240..0x2c0, 0..0x40] {
                mapping.note_written(noted).unwrap();
            }
            mapping.sync_for_cpu(0..0x180).unwrap();
            let buffer = mapping.unmap().unwrap();
            let wanted = [vec![6; 0x180], vec![5; 0x80], vec![6; 0xc0], vec![5; 0x140]].concat();
            assert_eq!(buffer.bytes(), wanted, "{written:?} {direction:?}");
            pooled.assert_no_slot_is_lost();
        }
    }
}

#[test]
fn a_buffer_is_given_to_the_device_again_by_a_sync() {
    // rule L49
    for written in [Written::Unknown, Written::Reported] {
        let pooled = bounce(written);
        let buffer = filled(&pooled, &[(0x5100, 0x400)], 5);
        let mut mapping = pooled.bench.device.map(buffer, Direction::FromDevice).unwrap();
        let iova = mapping.iova().0;
        assert!(pooled.device_writes(iova, &[6; 0x400]));
        mapping.note_written(0..0x300).unwrap();
        // Only a part, and more is noted than the device writes this time.
        mapping.sync_for_device(0x80..0x100).unwrap();
        assert!(pooled.device_writes(iova + 0x80, &[7; 0x40]));
        mapping.note_written(0x80..0x280).unwrap();
        let buffer = mapping.unmap().unwrap();
        let wanted = [vec![6; 0x80], vec![7; 0x40], vec![6; 0x240], vec![5; 0x100]].concat();
        assert_eq!(buffer.bytes(), wanted, "{written:?}");
        pooled.assert_no_slot_is_lost();
    }
}

#[test]
fn a_sync_moves_what_it_names_and_no_more() {
    // rule L49
    let pooled = bounce(Written::Unknown);
    let buffer = filled(&pooled, &[(0x5100, 0x400), (0x9000, 0x400)], 5);
    let mut mapping = pooled.bench.device.map(buffer, Direction::Bidirectional).unwrap();
    let iova = mapping.iova().0;
    assert!(pooled.device_writes(iova, &[6; 0x800]));
    mapping.sync_for_cpu(0x3f0..0x410).unwrap();
    assert_eq!(pooled.ram.read(0x5100, 0x400), [vec![5; 0x3f0], vec![6; 0x10]].concat());
    assert_eq!(pooled.ram.read(0x9000, 0x400), [vec![6; 0x10], vec![5; 0x3f0]].concat());
    pooled.ram.write(0x5100, &[8; 0x400]);
    mapping.sync_for_device(0x10..0x20).unwrap();
    let wanted = [vec![6; 0x10], vec![8; 0x10], vec![6; 0x7e0]].concat();
    assert_eq!(pooled.device_reads(iova, 0x800).unwrap(), wanted);
    for bad in [0..0x801, 0x801..0x801, u64::MAX - 1..u64::MAX] {
        assert!(mapping.sync_for_cpu(bad.clone()).is_err());
        assert!(mapping.sync_for_device(bad.clone()).is_err());
        assert!(mapping.note_written(bad).is_err());
    }
    // Against the direction of a mapping there is nothing to copy.
    let buffer = filled(&pooled, &[(0xd000, 0x400)], 5);
    let mut reads = pooled.bench.device.map(buffer, Direction::ToDevice).unwrap();
    pooled.ram.write(0xd000, &[8; 0x400]);
    reads.sync_for_cpu(0..0x400).unwrap();
    reads.note_written(0..0x400).unwrap();
    assert_eq!(reads.unmap().unwrap().bytes(), [8; 0x400]);
    drop(mapping);
    pooled.assert_no_slot_is_lost();
}

#[test]
fn a_slot_shows_its_next_owner_nothing_of_the_last() {
    for (first, next) in DIRECTIONS.iter().flat_map(|a| DIRECTIONS.map(|b| (*a, b))) {
        for written in [Written::Unknown, Written::Reported] {
            let pooled = bounce(written);
            let device = &pooled.bench.device;
            let long = device.map(filled(&pooled, &[(0x5000, 0x1000)], 0xaa), first).unwrap();
            long.unmap().unwrap();
            let short = device.map(filled(&pooled, &[(0x9000, 0x10)], 1), next).unwrap();
            let slot = pooled.bench.domain.reach(short.iova().0).unwrap().0;
            let bytes = pooled.ram.read(slot, 0x1000);
            let leaks = bytes.contains(&0xaa);
            assert!(!leaks, "{first:?} then {next:?}, {written:?}");
            drop(short);
            pooled.assert_no_slot_is_lost();
        }
    }
}

#[test]
fn a_late_write_into_a_slot_reaches_no_buffer() {
    // A late write of a device to a slot does not reach any buffer by itself; the slot's next owner
    // gets it only where the device reports to have written but has not.
    let pooled = bounce(Written::Reported);
    let device = &pooled.bench.device;
    let map = |at| device.map(filled(&pooled, &[(at, 0x1000)], 5), Direction::FromDevice).unwrap();
    let first = map(0x5000);
    let iova = first.iova().0;
    first.unmap().unwrap();
    assert!(pooled.device_writes(iova, &[0xbb; 0x1000]), "the slot stays mapped");
    assert_eq!(pooled.ram.read(0x5000, 0x1000), [0; 0x1000], "and the buffer is out of reach");
    let mut next = map(0x9000);
    assert_eq!(next.iova().0, iova, "the same slot");
    assert!(pooled.device_writes(iova, &[6; 0x10]));
    next.note_written(0..0x10).unwrap();
    assert_eq!(next.unmap().unwrap().bytes(), [vec![6; 0x10], vec![5; 0xff0]].concat());
    pooled.assert_no_slot_is_lost();
}

#[test]
fn without_a_slot_there_is_an_error_and_never_the_buffer_itself() {
    // rule L50
    let room = 2 * 4096;
    let setup = setup(Policy::StrictMap, |config| config.trust = UNTRUSTED);
    let pooled = Pooled::with(setup, BounceLimits::default(), room);
    let device = &pooled.bench.device;
    let map = |at| device.map(filled(&pooled, &[(at, 0x100)], 5), Direction::ToDevice);
    let held = [map(0x5000).unwrap(), map(0x6000).unwrap()];
    let error = map(0x7000).unwrap_err();
    assert!(matches!(error.error(), Error::Bounce(_)), "{:?}", error.error());
    assert!(error.into_buffer().is_some());
    assert!(pooled.bench.domain.cached().iter().all(|(_, target, _)| *target >= SLOTS));
    // Once there is a slot again, it succeeds.
    drop(held);
    drop(map(0x7000).unwrap());
    pooled.assert_no_slot_is_lost();
}

#[test]
fn a_trusted_device_maps_what_finds_no_slot() {
    // rule L50 applies only if the device must not see the buffer's neighbours.
    let pooled = Pooled::with(Setup::new(Policy::Bounce), BounceLimits::default(), 4096);
    let device = &pooled.bench.device;
    let map = |at| device.map(filled(&pooled, &[(at, 0x100)], 5), Direction::ToDevice).unwrap();
    let (first, second) = (map(0x5000), map(0x6000));
    assert_eq!((first.is_bounced(), second.is_bounced()), (true, false));
    assert_eq!((device.stats().bounced, device.stats().not_bounced), (1, 1));
    drop((first, second));
    pooled.assert_no_slot_is_lost();
}

#[test]
fn without_pools_an_untrusted_device_maps_only_what_fills_its_granules() {
    // rules L48, L50
    let bench = setup(Policy::StrictMap, |config| config.trust = UNTRUSTED).build();
    let error = bench.device.map(Buf::new(&[(0x5100, 0x100)]), Direction::ToDevice).unwrap_err();
    assert!(matches!(error.error(), Error::Neighbours { granule: 4096 }));
    assert_eq!(bench.domain.events(), [], "the domain got no request");
    drop(bench.device.map(Buf::new(&[(0x5000, 0x1000)]), Direction::ToDevice).unwrap());
    assert!(matches!(bench.device.take_buffer(1, Direction::ToDevice), Err(Error::NoPools)));
    bench.assert_nothing_leaked();
}

#[test]
fn what_is_mapped_for_long_is_never_a_copy() {
    for policy in [Policy::Bounce, Policy::Auto] {
        // Trusted: mapped, whatever its form.
        let pooled = Pooled::new(Setup::new(policy));
        let device = &pooled.bench.device;
        let ring = device.alloc_coherent(filled(&pooled, &[(0x5100, 0x100)], 5)).unwrap();
        let arena = filled(&pooled, &[(0x7100, 0x100)], 5);
        let arena = device.map_persistent(arena, Direction::Bidirectional).unwrap();
        assert_eq!(pooled.bench.domain.reach(ring.iova().0).unwrap().0, 0x5100);
        let targets = pooled.bench.domain.cached();
        assert!(targets.iter().any(|(_, target, _)| *target == 0x7000));
        assert_eq!(device.stats().bounced, 0);
        drop((ring, arena));
        pooled.assert_no_slot_is_lost();
        // Untrusted: refused, unless it fills its granules.
        let pooled = untrusted(policy);
        let device = &pooled.bench.device;
        let error = device.alloc_coherent(filled(&pooled, &[(0x5100, 0x100)], 5)).unwrap_err();
        assert!(matches!(error.error(), Error::Uncopied { granule: 4096 }));
        let arena = filled(&pooled, &[(0x7100, 0x100)], 5);
        let error = device.map_persistent(arena, Direction::Bidirectional).unwrap_err();
        assert!(matches!(error.error(), Error::Uncopied { granule: 4096 }));
        drop(device.alloc_coherent(filled(&pooled, &[(0x5000, 0x1000)], 5)).unwrap());
        assert_eq!((device.stats().bounced, pooled.pools.stats().slots), (0, 0));
        pooled.assert_no_slot_is_lost();
    }
}

#[test]
fn what_the_cpu_cannot_reach_is_mapped_or_refused() {
    // rule L50
    let pooled = bounce(Written::Reported);
    for direction in DIRECTIONS {
        let hidden = filled(&pooled, &[(0x5100, 0x100)], 5).hidden();
        assert!(!pooled.bench.device.map(hidden, direction).unwrap().is_bounced());
        // Nor a list that contains it: what was loaded of the rest is cleared.
        let hidden = filled(&pooled, &[(0x5100, 0x100)], 5).hidden();
        let list = vec![filled(&pooled, &[(0x7000, 0x100)], 0xaa), hidden];
        assert!(!pooled.bench.device.map(list, direction).unwrap().is_bounced());
        let next = pooled.bench.device.map(filled(&pooled, &[(0x9000, 1)], 1), direction).unwrap();
        let slot = pooled.bench.domain.reach(next.iova().0).unwrap().0;
        assert!(!pooled.ram.read(slot, 0x1000).contains(&0xaa));
    }
    pooled.assert_no_slot_is_lost();
    let pooled = untrusted(Policy::Bounce);
    for direction in DIRECTIONS {
        let hidden = filled(&pooled, &[(0x5100, 0x100)], 5).hidden();
        let error = pooled.bench.device.map(hidden, direction).unwrap_err();
        assert!(matches!(error.error(), Error::Uncopied { granule: 4096 }));
    }
    pooled.assert_no_slot_is_lost();
}

#[test]
fn a_dropped_mapping_brings_nothing_back() {
    for written in [Written::Unknown, Written::Reported] {
        let pooled = bounce(written);
        let buffer = filled(&pooled, &[(0x5000, 0x400)], 5);
        let mapping = pooled.bench.device.map(buffer, Direction::FromDevice).unwrap();
        assert!(pooled.device_writes(mapping.iova().0, &[6; 0x400]));
        let slot = pooled.bench.domain.reach(mapping.iova().0).unwrap().0;
        drop(mapping);
        assert_eq!(pooled.ram.read(0x5000, 0x400), [5; 0x400]);
        assert_eq!(pooled.ram.read(slot, 0x400), [0; 0x400], "scrubbed all the same");
        pooled.assert_no_slot_is_lost();
    }
}

#[test]
fn a_slot_costs_the_iommu_nothing() {
    let pooled = bounce(Written::Reported);
    let device = &pooled.bench.device;
    let once = || {
        let buffer = filled(&pooled, &[(0x5000, 0x100), (0x9000, 0x100)], 5);
        let mut mapping = device.map(buffer, Direction::FromDevice).unwrap();
        mapping.note_written(0..0x200).unwrap();
        drop(mapping.unmap().unwrap());
    };
    once();
    pooled.bench.domain.forget_events();
    (0..10).for_each(|_| once());
    assert_eq!(pooled.bench.domain.events(), Vec::<Event>::new());
    let stats = device.stats();
    assert_eq!((stats.maps, stats.unmaps, stats.bounced), (11, 11, 11));
    assert_eq!(stats.copied_bytes, 11 * 0x200);
    pooled.assert_no_slot_is_lost();
}

#[test]
fn the_threshold_is_the_longest_copy() {
    let pooled = Pooled::new(setup(Policy::Bounce, |config| config.bounce.threshold = 0x1000));
    let device = &pooled.bench.device;
    for (len, bounced) in [(1, true), (0x1000, true), (0x1001, false)] {
        let mapping = device.map(filled(&pooled, &[(0x5000, len)], 5), Direction::ToDevice);
        assert_eq!(mapping.unwrap().is_bounced(), bounced, "{len:#x}");
    }
    // An untrusted device bounces what it must, of any length.
    let pooled = Pooled::new(setup(Policy::Bounce, |config| {
        config.bounce.threshold = 0x1000;
        config.trust = UNTRUSTED;
    }));
    let long = filled(&pooled, &[(0x5001, 0x2000)], 5);
    assert!(pooled.bench.device.map(long, Direction::ToDevice).unwrap().is_bounced());
    pooled.assert_no_slot_is_lost();
}

#[test]
fn a_slot_is_kept_by_what_the_device_may_do() {
    let pooled = bounce(Written::Unknown);
    let device = &pooled.bench.device;
    let mut seen = Vec::new();
    for _ in 0..2 {
        for direction in DIRECTIONS {
            let buffer = filled(&pooled, &[(0x5000, 0x100)], 5);
            let mapping = device.map(buffer, direction).unwrap();
            let iova = mapping.iova().0;
            seen.push((iova, pooled.bench.domain.reach(iova).unwrap().1));
        }
    }
    assert_eq!(seen[..3], seen[3..], "each again in its own");
    let prots: Vec<Prot> = seen[..3].iter().map(|(_, prot)| *prot).collect();
    assert_eq!(prots, [Prot::READ, Prot::WRITE, Prot::RW]);
    pooled.assert_no_slot_is_lost();
}
