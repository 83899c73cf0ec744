//! The calibrated costs of copying and mapping.

use super::choices::{Calibration, ChoiceReason};
use crate::{Direction, bounce::Written, map_call::Sync};

/// What a mapping is expected to cost either way, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Prior {
    pub(super) copy_ns: u64,
    pub(super) map_ns: u64,
    /// Of `map_ns`: what the calls take, without the device's work.
    pub(super) calls_ns: u64,
}

impl Prior {
    pub(super) fn copies(self) -> bool {
        self.copy_ns < self.map_ns
    }

    pub(super) fn reason(self) -> ChoiceReason {
        let Prior { copy_ns, map_ns, .. } = self;
        ChoiceReason::Cost { copy_ns, map_ns }
    }
}

/// A mapping whose cost is to be estimated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) direction: Direction,
    pub(crate) len: u64,
    pub(crate) runs: u64,
    /// Whether it shares its syncs with others.
    pub(crate) sync: Sync,
    /// Whether the slot is loaded first where the device may write.
    pub(crate) written: Written,
}

impl Calibration {
    /// What a mapping is expected to cost; `None` if the calibration does not cover it.
    pub(super) fn expect(&self, kind: Kind) -> Option<Prior> {
        let Kind { direction, len, runs, sync, written } = kind;
        let loads = direction != Direction::FromDevice || written == Written::Unknown;
        let brings_back = direction != Direction::ToDevice;
        let copy_in = if loads { self.copy_ns(len, |cost| cost.in_ns)? } else { 0 };
        let copy_out = if brings_back { self.copy_ns(len, |cost| cost.out_ns)? } else { 0 };
        let (call, run) = (self.map_call_ns?, self.map_run_ns?);
        let (wall, lone) = (self.map_wall_ns?, self.map_lone_ns?);
        let calls_ns = call.saturating_add(run.saturating_mul(runs));
        let map_ns = match sync {
            // The device is at work on one mapping while the driver makes the next.
            Sync::Later => calls_ns.max(wall.saturating_mul(runs)),
            Sync::Now => lone.saturating_add(wall.saturating_mul(runs.saturating_sub(1))),
        };
        Some(Prior { copy_ns: copy_in.saturating_add(copy_out), map_ns, calls_ns })
    }

    /// The cost of the class that contains `len`; beyond the largest, scaled by the length.
    fn copy_ns(&self, len: u64, of: impl Fn(&super::choices::CopyCost) -> u64) -> Option<u64> {
        if let Some(cost) = self.copies.iter().find(|cost| len <= cost.bytes) {
            return Some(of(cost));
        }
        let largest = self.copies.last()?;
        let times = len as f64 / largest.bytes.max(1) as f64;
        // A float that is too large becomes the largest integer.
        Some((of(largest) as f64 * times) as u64)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::auto::choices::CopyCost;

    fn calibration() -> Calibration {
        let copies = vec![
            CopyCost { bytes: 512, in_ns: 10, out_ns: 20 },
            CopyCost { bytes: 1024, in_ns: 30, out_ns: 40 },
        ];
        Calibration {
            copies,
            map_call_ns: Some(50),
            map_run_ns: Some(100),
            map_wall_ns: Some(100),
            map_lone_ns: Some(1000),
            ..Calibration::default()
        }
    }

    fn kind(direction: Direction, len: u64) -> Kind {
        Kind { direction, len, runs: 1, sync: Sync::Later, written: Written::Reported }
    }

    #[test]
    fn a_copy_costs_what_its_direction_needs() {
        let expect = |kind| calibration().expect(kind).unwrap().copy_ns;
        assert_eq!(expect(kind(Direction::ToDevice, 1)), 10);
        assert_eq!(expect(kind(Direction::FromDevice, 512)), 20);
        assert_eq!(expect(kind(Direction::Bidirectional, 513)), 70);
        // rule L49: bytes that the device may leave unwritten are loaded first.
        let unknown = Kind { written: Written::Unknown, ..kind(Direction::FromDevice, 512) };
        assert_eq!(expect(unknown), 30);
        assert_eq!(expect(kind(Direction::ToDevice, 4096)), 120, "beyond the largest");
        assert_eq!(expect(kind(Direction::ToDevice, u64::MAX)) >> 48, 30 << 6);
    }

    #[test]
    fn a_map_costs_its_runs_and_its_share_of_a_sync() {
        let expect = |kind| calibration().expect(kind).unwrap().map_ns;
        let several = Kind { runs: 16, ..kind(Direction::ToDevice, 512) };
        assert_eq!(expect(several), 1650);
        assert_eq!(expect(Kind { sync: Sync::Now, ..several }), 2500);
        assert_eq!(expect(Kind { runs: u64::MAX, ..several }), u64::MAX);
        // The device takes longer than the driver.
        let slow = Calibration { map_wall_ns: Some(300), ..calibration() };
        let expect = |kind| slow.expect(kind).unwrap().map_ns;
        assert_eq!(expect(several), 4800);
        assert_eq!(expect(Kind { sync: Sync::Now, ..several }), 5500);
    }

    #[test]
    fn what_was_not_found_out_is_not_expected() {
        let kind = kind(Direction::ToDevice, 512);
        assert_eq!(Calibration::default().expect(kind), None);
        assert_eq!(Calibration { map_run_ns: None, ..calibration() }.expect(kind), None);
        assert_eq!(Calibration { copies: Vec::new(), ..calibration() }.expect(kind), None);
    }
}
