//! The checks, by what they are about.

/// A module's table of checks: rule, level, name and function of each, and what the device must do.
macro_rules! checks {
    ($($rule:literal $level:ident $name:literal => $run:expr, $says:literal;)*) => {
        pub(in crate::kit) const CHECKS: &[$crate::kit::Check] = &[$($crate::kit::Check {
            rule: $rule,
            level: $crate::kit::Level::$level,
            name: $name,
            says: $says,
            run: $run,
        }),*];
    };
}

mod attach;
mod bypass;
mod detach;
mod fault;
mod framing;
mod map;
mod offer;
mod probe;
mod unmap;

use super::Check;

pub(super) const ALL: [&[Check]; 9] = [
    offer::CHECKS,
    bypass::CHECKS,
    framing::CHECKS,
    attach::CHECKS,
    detach::CHECKS,
    map::CHECKS,
    unmap::CHECKS,
    probe::CHECKS,
    fault::CHECKS,
];
