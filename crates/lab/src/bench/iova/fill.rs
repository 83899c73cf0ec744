//! Live sets: what is allocated before anything is measured.

use std::time::{Duration, Instant};

use super::{
    pattern::{BESIDE, Live, Size},
    peers::{Contender, Subject, align, with_subject},
};
use crate::{block::mix, random::SplitMix};

/// Every implementation gets the same sequence of sizes, places and choices.
const SEED: u64 = 0x001f_0c3a_10a7_10e5;

/// A sequence of its own for every `part`.
pub(super) fn random(part: u64) -> SplitMix {
    SplitMix(mix(SEED ^ part))
}

/// Sizes drawn before anything is timed, used again and again.
pub(super) fn draw(size: Size) -> Vec<u64> {
    let mut rng = random(size.max << 16 | size.min);
    (0..1024).map(|_| size.min + rng.below(size.max - size.min + 1)).collect()
}

/// An allocated range; with 0 granules there is none, as the last request failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot {
    pub(super) first: u64,
    pub(super) granules: u64,
}

/// Why a set was not filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unfilled {
    /// It takes too long; else it does not fit.
    pub(super) late: bool,
    /// In words for a row's note.
    pub(super) why: String,
}

/// What is allocated.
#[derive(Debug, Default)]
pub(super) struct LiveSet {
    /// What `random` takes from.
    pub(super) churned: Vec<Slot>,
    /// What stays.
    pub(super) fixed: Vec<Slot>,
    /// Whether it was filled place by place, instead of by plain requests.
    pub(super) placed: bool,
}

impl LiveSet {
    /// An empty one with room for `live`, so that filling it takes memory for the allocator only.
    pub(super) fn with_room(live: Live, last: u64) -> LiveSet {
        LiveSet { churned: Vec::with_capacity(ranges(live, last) as usize), ..LiveSet::default() }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Slot> {
        self.churned.iter().chain(&self.fixed).filter(|slot| slot.granules > 0)
    }

    /// How many ranges are allocated.
    pub(super) fn len(&self) -> u64 {
        self.all().count() as u64
    }

    /// Allocates it all, by plain requests or, `placed`, range by range at places of our choice.
    /// `last` is the last granule.
    ///
    /// # Errors
    /// It does not fit, or takes longer than `limit`.
    pub(super) fn fill(
        &mut self,
        contender: &Contender,
        (live, size): (Live, Size),
        last: u64,
        placed: bool,
        limit: Duration,
    ) -> Result<(), Unfilled> {
        self.placed = placed;
        let deadline = Instant::now() + limit;
        let sizes = match live {
            Live::Count(_) => draw(size),
            Live::Full { block, .. } => vec![block],
        };
        let count = ranges(live, last);
        let late = |done: u64, of: u64, what: &str| {
            let (seconds, late) = (limit.as_secs_f64(), Instant::now() > deadline);
            let text = || format!("{what} {done} of {of} ranges took more than {seconds} s");
            if late { Err(Unfilled { late, why: text() }) } else { Ok(()) }
        };
        let mut next = 1;
        for index in 0..count {
            let granules = sizes[index as usize % sizes.len()];
            let place = u64::next_multiple_of(next, align(granules));
            let first = with_subject!(contender, subject => match placed {
                true => subject.place(place, granules).then_some(place),
                false => subject.take(granules),
            });
            next = place + granules;
            let Some(first) = first else {
                let why = format!("{index} of {count} ranges fitted");
                return Err(Unfilled { late: false, why });
            };
            self.churned.push(Slot { first, granules });
            // Each can take a millisecond.
            if index % 64 == 0 {
                late(index, count, "filling")?;
            }
        }
        if let Live::Full { percent, block } = live {
            // Sorted by address first: so the same places become holes whatever the order of
            // filling.
            self.churned.sort_unstable();
            random(self.churned.len() as u64).shuffle(&mut self.churned);
            let keep = (last + 1) * percent / 100 / block;
            let holes = self.churned.drain(keep.min(count) as usize..).rev();
            for (freed, slot) in (1..).zip(holes) {
                with_subject!(contender, subject => subject.give(slot.first, slot.granules));
                if freed % 64 == 0 {
                    late(freed, count - keep, "freeing")?;
                }
            }
            // `random` takes from the set only if it is made of what is measured. If not, ranges
            // beside it are churned: if other sizes replaced its own blocks, every operation would
            // change the set, and a faster allocator would face one that has changed more.
            if size != (Size { min: block, max: block }) {
                self.fixed = std::mem::take(&mut self.churned);
            }
        }
        Ok(())
    }

    /// Allocates what `random` churns beside a set of other sizes. What does not fit stays empty.
    pub(super) fn fill_beside(&mut self, contender: &Contender, size: Size) {
        if !self.churned.is_empty() {
            return;
        }
        let sizes = draw(size);
        for index in 0..BESIDE {
            let granules = sizes[index as usize % sizes.len()];
            let first = with_subject!(contender, subject => subject.take(granules));
            let slot = first.map_or(Slot::default(), |first| Slot { first, granules });
            self.churned.push(slot);
        }
    }
}

/// How many ranges a set is filled with: as many aligned blocks as there are up to granule `last`,
/// that of granule 0 left out, if it is full.
fn ranges(live: Live, last: u64) -> u64 {
    match live {
        Live::Count(count) => count,
        Live::Full { block, .. } => (last + 1) / block - 1,
    }
}

#[cfg(test)]
mod tests {
    use ringfence_iova::Aperture;

    use super::*;
    use crate::bench::iova::{GRANULE, peers::Implementation};

    const LAST: u64 = (1 << 20) - 1;

    fn filled(one: Implementation, live: Live, size: Size) -> LiveSet {
        let aperture = Aperture::new(0, (1 << 32) - 1, GRANULE).unwrap();
        let contender = one.make(aperture);
        let placed = one.is_placed();
        let mut set = LiveSet::with_room(live, LAST);
        set.fill(&contender, (live, size), LAST, placed, Duration::from_secs(100)).unwrap();
        set
    }

    #[test]
    fn a_full_set_has_the_same_holes_for_everyone() {
        let live = Live::Full { percent: 48, block: 16 };
        let sets = ["rbtree", "bitmap", "btreemap", "vm-allocator", "ringfence"].map(|name| {
            let set = filled(name.parse().unwrap(), live, Size::SIXTEEN);
            let mut firsts: Vec<u64> = set.all().map(|slot| slot.first).collect();
            firsts.sort_unstable();
            firsts
        });
        for set in &sets {
            assert_eq!(set.len(), (1 << 20) * 48 / 100 / 16);
            assert!(set.iter().all(|first| first % 16 == 0));
            assert!(*set == sets[0]);
        }
    }

    #[test]
    fn a_full_set_of_other_sizes_stays_and_ranges_beside_it_are_churned() {
        let live = Live::Full { percent: 90, block: 16 };
        let size = Size { min: 1, max: 32 };
        let aperture = Aperture::new(0, (1 << 32) - 1, GRANULE).unwrap();
        let contender = Implementation::BTreeMap.make(aperture);
        let mut set = LiveSet::with_room(live, LAST);
        set.fill(&contender, (live, size), LAST, false, Duration::from_secs(100)).unwrap();
        assert!(set.churned.is_empty());
        set.fill_beside(&contender, size);
        assert_eq!(set.churned.len() as u64, BESIDE);
        assert_eq!(set.fixed.len(), (1 << 20) * 90 / 100 / 16);
    }

    #[test]
    fn a_set_that_does_not_fit_or_takes_too_long_says_so() {
        let aperture = Aperture::new(0, (1 << 32) - 1, GRANULE).unwrap();
        let size = Size { min: 33, max: 512 };
        let live = Live::Count(100_000);
        let mut set = LiveSet::with_room(live, LAST);
        let contender = Implementation::BTreeMap.make(aperture);
        let error = set.fill(&contender, (live, size), LAST, false, Duration::from_secs(100));
        assert!(
            matches!(error, Err(Unfilled { late: false, why }) if why.ends_with("of 100000 ranges fitted"))
        );
        let contender = Implementation::BTreeMap.make(aperture);
        let mut set = LiveSet::with_room(live, LAST);
        let error = set.fill(&contender, (live, size), LAST, false, Duration::ZERO);
        assert!(
            matches!(error, Err(Unfilled { late: true, why }) if why.contains("took more than"))
        );
    }

    #[test]
    fn sizes_are_drawn_from_the_whole_mix() {
        let sizes = draw(Size { min: 33, max: 512 });
        assert!(sizes.iter().all(|size| (33..=512).contains(size)));
        assert!(sizes.iter().any(|size| *size < 64) && sizes.iter().any(|size| *size > 480));
        assert_eq!(sizes, draw(Size { min: 33, max: 512 }), "the same each time");
    }
}
