//! What a check is.

use super::{
    Finding, Level, Outcome,
    bench::{Bench, Verdict},
};

/// One requirement on a device.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The number of the rule: 22 for V22.
    pub rule: u8,
    /// How much it binds.
    pub level: Level,
    /// Its name, unique.
    pub name: &'static str,
    /// What the device must do, in a sentence.
    pub says: &'static str,
    pub(super) run: fn(&mut Bench<'_>) -> Verdict,
}

impl Check {
    pub(super) const fn new(
        rule: u8,
        level: Level,
        name: &'static str,
        says: &'static str,
        run: fn(&mut Bench<'_>) -> Verdict,
    ) -> Check {
        Check { rule, level, name, says, run }
    }

    pub(super) fn finding(&self, outcome: Outcome) -> Finding {
        let Check { rule, level, name: check, says, .. } = *self;
        Finding { rule, level, check, says, outcome }
    }
}
