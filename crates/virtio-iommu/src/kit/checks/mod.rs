//! The checks, by what they are about.

mod offer;

use super::Check;

pub(super) const ALL: [&[Check]; 1] = [offer::CHECKS];
