//! A set of numbers, as ranges of which no two touch.

use std::collections::BTreeMap;

/// The last number of each range by its first.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Ranges(pub(crate) BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range; returns the one that it is part of then, or `None` if some of it is there
    /// already.
    pub(crate) fn insert(&mut self, first: u64, last: u64) -> Option<(u64, u64)> {
        let below = self.0.range(..=last).next_back().map(|(from, to)| (*from, *to));
        if below.is_some_and(|(_, to)| to >= first) {
            return None;
        }
        let from = match below {
            Some((from, to)) if to + 1 == first => from,
            _ => first,
        };
        let to = last.checked_add(1).and_then(|next| self.0.remove(&next)).unwrap_or(last);
        self.0.insert(from, to);
        Some((from, to))
    }

    /// Takes a range out of the one that it is part of; false if there is none.
    pub(crate) fn remove(&mut self, first: u64, last: u64) -> bool {
        let whole = self.0.range(..=first).next_back().map(|(from, to)| (*from, *to));
        let whole = whole.filter(|(_, to)| *to >= last);
        whole.is_some_and(|whole| {
            self.cut(whole, (first, last));
            true
        })
    }

    /// Takes a range out of this `whole` one.
    pub(crate) fn cut(&mut self, whole: (u64, u64), (first, last): (u64, u64)) {
        if first == whole.0 {
            self.0.remove(&first);
        } else {
            self.0.insert(whole.0, first - 1);
        }
        if last < whole.1 {
            self.0.insert(last + 1, whole.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_are_those_of_a_bitmap(
            script in prop::collection::vec((any::<bool>(), 0_u64..40, 1_u64..5), 1..80),
        ) {
            let mut ranges = Ranges::default();
            let mut bitmap = [false; 48];
            let mut there: Vec<(u64, u64)> = Vec::new();
            for (add, first, count) in script {
                let (last, numbers) = (first + count - 1, first as usize..(first + count) as usize);
                if add {
                    let free = bitmap[numbers.clone()].iter().all(|number| !number);
                    let run = ranges.insert(first, last);
                    prop_assert_eq!(run.is_some(), free);
                    if free {
                        bitmap[numbers].fill(true);
                        there.push((first, last));
                        let below = (0..first as usize).rev().take_while(|at| bitmap[*at]).count();
                        let above = (first + count..48).take_while(|at| bitmap[*at as usize]).count();
                        let expected = (first - below as u64, last + above as u64);
                        prop_assert_eq!(run, Some(expected));
                    }
                } else if !there.is_empty() {
                    let (first, last) = there.swap_remove(first as usize % there.len());
                    prop_assert!(ranges.remove(first, last));
                    bitmap[first as usize..=last as usize].fill(false);
                }
                let total: u64 = ranges.0.iter().map(|(from, to)| to - from + 1).sum();
                prop_assert_eq!(total, bitmap.iter().filter(|number| **number).count() as u64);
            }
        }
    }
}
