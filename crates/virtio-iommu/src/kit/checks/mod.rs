//! The checks, by what they are about.

/// A module's table of checks: rule, level, name, features that it takes and function of each, and
/// what the device must do.
macro_rules! checks {
    ($(
        $rule:literal $level:ident $name:literal $([$($needs:ident)+])? => $run:expr, $says:literal;
    )*) => {
        pub(crate) const CHECKS: &[$crate::kit::Check] = &[$($crate::kit::Check {
            rule: $rule,
            level: $crate::kit::Level::$level,
            name: $name,
            says: $says,
            needs: $crate::wire::Features::empty()$($(.union($crate::wire::Features::$needs))+)?,
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
