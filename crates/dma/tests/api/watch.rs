//! Watching an unmapped IOVA.

use ringfence_dma::{Direction, Policy};

use crate::mock::{Bench, Buf};

fn map(bench: &Bench) -> ringfence_dma::Mapping<Buf> {
    bench.device.map(Buf::new(&[(0x1000, 0x1000)]), Direction::ToDevice).unwrap()
}

#[test]
fn a_watched_iova_is_not_reused_while_it_is_watched() {
    // rule L19
    for policy in [Policy::StrictMap, Policy::LazySq, Policy::LazyMqMap] {
        let bench = Bench::new(policy);
        let mapping = map(&bench);
        let iova = mapping.iova();
        let (buffer, stale) = mapping.unmap_watched().unwrap();
        assert_eq!(buffer.pieces, [(0x1000, 0x1000)]);
        assert_eq!(stale.iova(), iova);
        bench.device.flush().unwrap();
        assert!(stale.released_at_ns().is_some());
        let other = map(&bench);
        assert_ne!(other.iova(), iova);
        drop(stale);
        let third = map(&bench);
        assert_eq!(third.iova(), iova, "free once it is no longer watched");
        drop((other, third));
        bench.device.flush().unwrap();
        bench.assert_nothing_leaked();
    }
}

#[test]
fn a_watcher_learns_when_a_lazy_unmap_was_queued_and_when_released() {
    let bench = Bench::new(Policy::LazySqMap);
    let mapping = map(&bench);
    let iova = mapping.iova().0;
    let (_, stale) = mapping.unmap_watched().unwrap();
    assert_eq!(stale.queued_at_ns(), 1_000_000);
    bench.clock.advance(500);
    assert_eq!(stale.released_at_ns(), None);
    assert!(bench.domain.reach(iova).is_some());
    bench.device.expire().unwrap();
    assert_eq!(stale.released_at_ns(), Some(1_000_500));
    assert_eq!(bench.domain.reach(iova), None);
}

#[test]
fn a_strict_unmap_is_released_when_it_returns_and_under_off_never() {
    let bench = Bench::new(Policy::Strict);
    let (_, stale) = map(&bench).unmap_watched().unwrap();
    assert_eq!(bench.domain.reach(stale.iova().0), None);
    assert_eq!((stale.queued_at_ns(), stale.released_at_ns()), (1_000_000, Some(1_000_000)));

    let bench = Bench::new(Policy::Off);
    let (_, stale) = map(&bench).unmap_watched().unwrap();
    assert_eq!((stale.iova().0, stale.range(), stale.released_at_ns()), (0x1000, None, None));
}

#[test]
fn an_iova_whose_watcher_leaves_first_waits_for_its_flush_all_the_same() {
    // rule L19
    let bench = Bench::new(Policy::LazySq);
    let mapping = map(&bench);
    let iova = mapping.iova();
    drop(mapping.unmap_watched().unwrap());
    assert_eq!(bench.allocator.live(), 1);
    let other = map(&bench);
    assert_ne!(other.iova(), iova);
    bench.device.flush().unwrap();
    drop(other);
    bench.device.flush().unwrap();
    bench.assert_nothing_leaked();
}

#[test]
fn an_unmap_that_fails_while_watched_keeps_the_buffer() {
    let bench = Bench::new(Policy::StrictMap);
    let mapping = map(&bench);
    bench.domain.fail_after(1);
    assert!(mapping.unmap_watched().is_err());
    assert_eq!((bench.device.stats().quarantined, bench.allocator.live()), (1, 1));
}
