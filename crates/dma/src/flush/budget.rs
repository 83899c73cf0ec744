//! How many bytes may be exposed at a time.

use ringfence_sync::{
    atomic::{AtomicI64, Ordering},
    mutant,
};

/// The bytes that may still be exposed, under a bound that can change meanwhile.
///
/// Bytes are reserved before their translation is removed, and given back after the flush that
/// covers it has finished: so the exposed bytes never exceed the reserved ones, and those never
/// exceed the bound.
pub(crate) struct Budget {
    /// The bound less what is reserved: one number, so that a thread sees both in step. Negative
    /// after the bound was lowered below what was reserved.
    left: AtomicI64,
    /// The bound itself. Only reported and compared with, it decides nothing: hence an atomic of
    /// `core`, not the model's.
    bound: core::sync::atomic::AtomicI64,
}

impl Budget {
    /// Nothing may be exposed.
    pub(crate) fn new() -> Self {
        Budget { left: AtomicI64::new(0), bound: core::sync::atomic::AtomicI64::new(0) }
    }

    /// Changes the bound; bytes above 2^63-1 count as that. One thread at a time.
    pub(crate) fn set(&self, bytes: u64) {
        let bound = i64::try_from(bytes).unwrap_or(i64::MAX);
        let before = self.bound.swap(bound, Ordering::Relaxed);
        // Neither the difference nor the sum can overflow: what is left is a bound, at least 0,
        // less what was reserved under bounds, at most 2^63-1.
        // Ordering: a bound says how much, not what came before.
        self.left.fetch_add(bound - before, Ordering::AcqRel);
    }

    /// Whether the bound ever allows `bytes`.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        i64::try_from(bytes).is_ok_and(|bytes| bytes <= self.bound.load(Ordering::Relaxed))
    }

    /// Reserves `bytes`, if they are left.
    #[must_use]
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        let Ok(bytes) = i64::try_from(bytes) else { return false };
        let less = |left| (left >= bytes).then(|| left - bytes);
        if mutant!("bytes are looked for and reserved in two steps") {
            let fits = less(self.left.load(Ordering::Relaxed)).is_some();
            self.left.fetch_sub(if fits { bytes } else { 0 }, Ordering::Relaxed);
            return fits;
        }
        // Acquire: a flush that made room was over before.
        self.left.fetch_update(Ordering::Acquire, Ordering::Relaxed, less).is_ok()
    }

    /// Gives back bytes that were reserved.
    pub(crate) fn give_back(&self, bytes: u64) {
        // What was reserved fits: `reserve` converted it.
        self.left.fetch_add(i64::try_from(bytes).unwrap_or(i64::MAX), Ordering::Release);
    }

    /// Whether more is reserved than the bound, after that was lowered.
    pub(crate) fn is_overdrawn(&self) -> bool {
        self.left.load(Ordering::Relaxed) < 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Set(u64),
        Reserve(u64),
        GiveBack(usize),
    }

    fn bytes() -> impl Strategy<Value = u64> {
        prop_oneof![0..20u64, Just(i64::MAX as u64), Just(u64::MAX), any::<u64>()]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            1 => bytes().prop_map(Step::Set),
            4 => bytes().prop_map(Step::Reserve),
            3 => any::<usize>().prop_map(Step::GiveBack),
        ]
    }

    proptest! {
        #[test]
        fn bytes_are_reserved_exactly_while_they_fit_the_bound(steps in vec(step(), 1..40)) {
            let budget = Budget::new();
            let (mut bound, mut held) = (0u64, Vec::<u64>::new());
            for step in steps {
                let sum: u128 = held.iter().copied().map(u128::from).sum();
                match step {
                    Step::Set(bytes) => {
                        budget.set(bytes);
                        bound = bytes.min(i64::MAX as u64);
                    }
                    Step::Reserve(bytes) => {
                        let fits = sum + u128::from(bytes) <= u128::from(bound);
                        prop_assert_eq!(budget.reserve(bytes), fits);
                        prop_assert_eq!(budget.fits(bytes), bytes <= bound);
                        held.extend(fits.then_some(bytes));
                    }
                    Step::GiveBack(which) if !held.is_empty() => {
                        let which = which % held.len();
                        budget.give_back(held.swap_remove(which));
                    }
                    Step::GiveBack(_) => {}
                }
                let sum: u128 = held.iter().copied().map(u128::from).sum();
                prop_assert_eq!(budget.is_overdrawn(), sum > u128::from(bound));
            }
        }
    }
}
