use super::*;
use crate::Align;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    vec::Vec,
};

const PAGE: u64 = 4096;

/// Sixteen pages, 1 to 16.
fn aperture() -> Aperture {
    Aperture::new(PAGE, 17 * PAGE - 1, PAGE).unwrap()
}

fn lazy() -> (Bitmap, Arc<AtomicU64>) {
    let flushes = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&flushes);
    let flush = move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    (Bitmap::lazy(aperture(), DEFAULT_WINDOW, Box::new(flush)), flushes)
}

fn page(bitmap: &Bitmap) -> u64 {
    bitmap.alloc(&Request::new(PAGE)).unwrap() / PAGE
}

#[test]
fn a_search_goes_on_where_the_last_one_ended() {
    let bitmap = Bitmap::new(aperture(), DEFAULT_WINDOW);
    assert_eq!((page(&bitmap), page(&bitmap), page(&bitmap)), (1, 2, 3));
    bitmap.free(2 * PAGE, PAGE).unwrap();
    assert_eq!(page(&bitmap), 4);
    for _ in 5..=16 {
        page(&bitmap);
    }
    assert_eq!(bitmap.stats().laps, 0);
    assert_eq!(page(&bitmap), 2);
    assert_eq!(bitmap.stats().laps, 1);
    let error = bitmap.alloc(&Request::new(PAGE)).unwrap_err();
    assert_eq!(error.reason, AllocReason::Exhausted { first: PAGE, last: 17 * PAGE - 1 });
}

#[test]
fn a_lazily_freed_range_is_not_reused_before_the_lap_and_a_lap_flushes_once() {
    // rule L16
    let (bitmap, flushes) = lazy();
    // Each page is freed at once, yet no page occurs twice in a lap.
    for lap in 0..5 {
        for number in 1..=16 {
            assert_eq!(page(&bitmap), number);
            bitmap.free(number * PAGE, PAGE).unwrap();
            assert_eq!((bitmap.stats().laps, flushes.load(Ordering::Relaxed)), (lap, lap));
        }
    }
    // Until a flush freed pages stay taken; after it only the others do.
    assert_eq!(bitmap.stats().live_ranges, 16);
    assert_eq!(page(&bitmap), 1);
    assert_eq!(bitmap.stats().live_ranges, 1);
    // A lap that finds nothing counts all the same.
    for _ in 2..=16 {
        page(&bitmap);
    }
    assert!(bitmap.alloc(&Request::new(PAGE)).is_err());
    assert_eq!((bitmap.stats().laps, flushes.load(Ordering::Relaxed)), (6, 6));
}

#[test]
fn what_is_freed_while_the_flush_runs_waits_for_the_next_one() {
    // rule L16
    use std::sync::OnceLock;
    let bitmap = Arc::new(OnceLock::<Bitmap>::new());
    let inside = Arc::clone(&bitmap);
    let flush = move || {
        let bitmap = inside.get().expect("set before the first lap");
        if bitmap.stats().laps == 0 {
            bitmap.free(5 * PAGE, PAGE).unwrap();
            // Neither page is available yet, and neither can be freed again.
            let again = bitmap.free(5 * PAGE, PAGE).unwrap_err();
            assert_eq!(again.reason, FreeReason::AlreadyFree);
            let flushing = bitmap.free(4 * PAGE, PAGE).unwrap_err();
            assert_eq!(flushing.reason, FreeReason::AlreadyFree);
        }
        Ok(())
    };
    let _ = bitmap.set(Bitmap::lazy(aperture(), DEFAULT_WINDOW, Box::new(flush)));
    let bitmap = bitmap.get().unwrap();
    for _ in 0..16 {
        page(bitmap);
    }
    bitmap.free(4 * PAGE, PAGE).unwrap();
    assert_eq!(page(bitmap), 4);
    assert_eq!(bitmap.stats().laps, 1);
    // Page 5 was freed during that flush: it needs another one.
    assert_eq!(page(bitmap), 5);
    assert_eq!(bitmap.stats().laps, 2);
    assert!(bitmap.alloc(&Request::new(PAGE)).is_err());
    assert_eq!(bitmap.stats().live_ranges, 16);
}

#[test]
fn nothing_is_reused_after_a_flush_that_failed() {
    // rule L16
    let healthy = Arc::new(AtomicU64::new(0));
    let state = Arc::clone(&healthy);
    let flush = move || if state.load(Ordering::Relaxed) == 1 { Ok(()) } else { Err(FlushFailed) };
    let bitmap = Bitmap::lazy(aperture(), DEFAULT_WINDOW, Box::new(flush));
    for _ in 0..16 {
        page(&bitmap);
    }
    bitmap.free(7 * PAGE, PAGE).unwrap();
    for _ in 0..3 {
        let error = bitmap.alloc(&Request::new(PAGE)).unwrap_err();
        assert_eq!(error.reason, AllocReason::FlushFailed);
    }
    assert_eq!(bitmap.free(7 * PAGE, PAGE).unwrap_err().reason, FreeReason::AlreadyFree);
    healthy.store(1, Ordering::Relaxed);
    assert_eq!(page(&bitmap), 7);
    assert_eq!((bitmap.stats().laps, bitmap.stats().failures), (1, 3));
}

#[test]
fn a_free_must_be_of_exactly_one_range() {
    for bitmap in [Bitmap::new(aperture(), DEFAULT_WINDOW), lazy().0] {
        let four = Request::new(4 * PAGE).align(Align::Bytes(PAGE));
        assert_eq!(bitmap.alloc(&four), Ok(PAGE));
        assert_eq!(bitmap.alloc(&four), Ok(5 * PAGE));
        for (number, pages, reason) in [
            (1, 3, FreeReason::WrongRange),
            (1, 5, FreeReason::WrongRange),
            (1, 8, FreeReason::WrongRange),
            (2, 3, FreeReason::WrongRange),
            (5, 1, FreeReason::WrongRange),
            (9, 1, FreeReason::NotAllocated),
            (16, 2, FreeReason::NotAllocated),
            (17, 1, FreeReason::NotAllocated),
            (0, 1, FreeReason::NotAllocated),
        ] {
            let error = bitmap.free(number * PAGE, pages * PAGE).unwrap_err();
            assert_eq!(error.reason, reason, "{pages} pages at {number}");
            assert_eq!(bitmap.check_free(number * PAGE, pages * PAGE), Err(error));
        }
        bitmap.free(PAGE, 4 * PAGE).unwrap();
        assert!(bitmap.free(PAGE, 4 * PAGE).is_err());
        assert_eq!(bitmap.check_free(5 * PAGE, 4 * PAGE), Ok(()));
        bitmap.free(5 * PAGE, 4 * PAGE).unwrap();
        assert_eq!(bitmap.stats().rejected_frees, 10);
    }
}

#[test]
fn reservations_merge_and_are_never_handed_out() {
    // rule L15
    let bitmap = Bitmap::new(aperture(), DEFAULT_WINDOW);
    bitmap.reserve(3 * PAGE + 5, 5 * PAGE).unwrap();
    bitmap.reserve(5 * PAGE, 8 * PAGE).unwrap();
    bitmap.reserve(0, 1).unwrap();
    bitmap.reserve(16 * PAGE, u64::MAX).unwrap();
    assert_eq!(bitmap.state.lock().reserved, [(2, 7), (15, 15)]);
    let pages: Vec<u64> = (0..9).map(|_| page(&bitmap)).collect();
    assert_eq!(pages, [1, 2, 9, 10, 11, 12, 13, 14, 15]);
    assert!(bitmap.alloc(&Request::new(1)).is_err());
    assert_eq!(bitmap.free(4 * PAGE, PAGE).unwrap_err().reason, FreeReason::Reserved);
    let error = bitmap.reserve(7 * PAGE, 10 * PAGE).unwrap_err();
    let (first, last, taken) = (7 * PAGE, 10 * PAGE, 9 * PAGE);
    assert_eq!(error, ReserveError::InUse { first, last, taken });
    assert_eq!(bitmap.state.lock().reserved, [(2, 7), (15, 15)]);
}

#[test]
fn the_window_is_a_part_of_the_aperture_and_bounded() {
    let huge = Aperture::new(0, (1 << 57) - 1, PAGE).unwrap();
    let window = Bitmap::new(huge, DEFAULT_WINDOW).window();
    assert_eq!((window.first(), window.last()), (PAGE, DEFAULT_WINDOW + PAGE - 1));
    let window = Bitmap::new(huge, 0).window();
    assert_eq!((window.first(), window.last()), (PAGE, 2 * PAGE - 1));
    let window = Bitmap::new(huge, u64::MAX).window();
    assert_eq!(window.last(), PAGE * (MAX_GRANULES + 1) - 1);
    let small = Bitmap::new(aperture(), u64::MAX);
    assert_eq!(small.window(), aperture());
    // A size that the window can never hold is reported as such, and costs no lap.
    let error = small.alloc(&Request::new(17 * PAGE)).unwrap_err();
    assert!(matches!(error.reason, AllocReason::ApertureTooSmall { .. }));
    assert_eq!(small.stats().laps, 0);
}

#[test]
fn the_top_of_the_space_is_like_any_other_place() {
    // rule L2
    let top = Aperture::new(u64::MAX - (4 * PAGE - 1), u64::MAX, PAGE).unwrap();
    let bitmap = Bitmap::new(top, DEFAULT_WINDOW);
    let iovas: Vec<u64> = (0..4).map(|_| bitmap.alloc(&Request::new(PAGE)).unwrap()).collect();
    assert_eq!(iovas[3], u64::MAX - (PAGE - 1));
    assert!(bitmap.alloc(&Request::new(PAGE)).is_err());
    bitmap.free(iovas[3], PAGE).unwrap();
    assert_eq!(bitmap.alloc(&Request::new(PAGE)), Ok(iovas[3]));
}

#[test]
fn threads_that_end_a_lap_together_flush_once_for_it() {
    // rule L16
    let (bitmap, flushes) = lazy();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    let iova = bitmap.alloc(&Request::new(PAGE)).unwrap();
                    bitmap.free(iova, PAGE).unwrap();
                }
            });
        }
    });
    let stats = bitmap.stats();
    assert_eq!((stats.allocs, stats.frees), (4000, 4000));
    assert_eq!(stats.laps, flushes.load(Ordering::Relaxed));
    // A lap hands out at most sixteen pages and here at least fifteen, as one may be in use.
    assert!(stats.laps >= 4000 / 16 - 1 && stats.laps <= 4000 / 15 + 1, "{} laps", stats.laps);
}
