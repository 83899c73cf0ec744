//! The checks, by what they are about.

mod attach;
mod bypass;
mod detach;
mod fault;
mod framing;
mod map;
mod offer;
mod probe;
mod regions;
mod translate;
mod unmap;

use super::Check;

pub(super) const ALL: [&[Check]; 11] = [
    offer::CHECKS,
    bypass::CHECKS,
    framing::CHECKS,
    attach::CHECKS,
    detach::CHECKS,
    map::CHECKS,
    translate::CHECKS,
    unmap::CHECKS,
    probe::CHECKS,
    regions::CHECKS,
    fault::CHECKS,
];
