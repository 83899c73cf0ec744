//! Steps that are made to fail.

/// A step at which a kernel can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Memory for a mapping's record: ENOMEM.
    Record,
    /// Pinning a page: EFAULT.
    Pin,
    /// A table of the IOMMU in the middle of a run: ENOMEM.
    Table,
    /// Mapping a run in the IOMMU: ENOMEM.
    Map,
    /// The bitmap of a mapping's dirty pages: ENOMEM.
    Bitmap,
    /// Memory to gather regions that are unmapped: no error, each is synced on its own.
    Region,
    /// Memory for the record of an external pin: ENOMEM.
    ExternalPin,
}

/// Which steps fail.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<(Step, u64)>);

impl Faults {
    /// Makes the `nth` step of this kind from now on fail; 1 is the next one.
    pub(super) fn fail(&mut self, step: Step, nth: u64) {
        self.0.push((step, nth.max(1)));
    }

    /// Clears pending failures; returns whether there were any.
    pub(super) fn clear(&mut self) -> bool {
        !std::mem::take(&mut self.0).is_empty()
    }

    /// How many of `count` steps in a row succeed. The one that fails counts as taken only if it is
    /// the first.
    pub(super) fn pass(&mut self, step: Step, count: u64) -> u64 {
        let next = self.0.iter().filter(|(of, _)| *of == step).map(|(_, nth)| nth - 1).min();
        let passed = next.map_or(count, |good| good.min(count));
        let taken = passed.max(1);
        for (of, nth) in &mut self.0 {
            if *of == step {
                *nth = nth.saturating_sub(taken);
            }
        }
        self.0.retain(|(_, nth)| *nth > 0);
        passed
    }

    /// Whether the next step fails.
    pub(super) fn hits(&mut self, step: Step) -> bool {
        self.pass(step, 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_step_fails_and_no_other() {
        let mut faults = Faults::default();
        faults.fail(Step::Pin, 4);
        faults.fail(Step::Map, 1);
        assert_eq!(faults.pass(Step::Pin, 2), 2);
        assert_eq!(faults.pass(Step::Pin, 5), 1);
        assert!(faults.hits(Step::Pin));
        assert_eq!(faults.pass(Step::Pin, 5), 5);
        assert!(faults.clear() && !faults.hits(Step::Map));
    }
}
