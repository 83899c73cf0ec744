//! Which mappings are copies.

use ringfence_iommu::Address;

use crate::{
    BounceConfig, Policy,
    auto::{Auto, Cell, Choice, Kind, Slice},
    bounce::Client,
    map_call::{MapCall, Measured},
    mode::Mode,
};

/// The longest mapping that [`Policy::Auto`] copies, in bytes: for a longer
/// one the cost of a sync is negligible.
const LONGEST: u64 = 4 << 20;

/// A device's share of its domain's pools.
pub(crate) struct Bouncer<T: Address> {
    pub(crate) client: Client<T>,
    pub(crate) config: BounceConfig,
    /// Chooses under a policy that leaves it open.
    pub(crate) auto: Auto,
}

impl<T: Address> Bouncer<T> {
    /// Decides whether a streaming mapping that need not be a copy becomes one; also returns the cell
    /// that made the choice, unless the policy did.
    pub(crate) fn decide(
        &self,
        mode: Mode,
        wanted: &MapCall<'_, T>,
        measured: &Measured,
    ) -> (Choice, Option<Cell>) {
        let &Measured { len, runs, .. } = measured;
        if mode.policy != Policy::Auto {
            let copy = mode.policy.bounces() && len <= self.config.threshold;
            return (Choice { copy, slice: Slice::NONE }, None);
        }
        if len > LONGEST {
            return (Choice { copy: false, slice: Slice::NONE }, None);
        }
        let &MapCall { direction, sync, .. } = wanted;
        let written = self.config.written;
        let cell = Cell::of(direction, len, runs);
        let choice = self.auto.choose(cell, || Kind { direction, len, runs, sync, written });
        (choice, Some(cell))
    }
}
