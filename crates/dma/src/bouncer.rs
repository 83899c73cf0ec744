//! Which mappings are copies.

use ringfence_iommu::Address;

use crate::{BounceConfig, bounce::Client, device::Wanted, mapper::Measured, mode::Mode};

/// For how long something is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lasting {
    /// For one I/O.
    Streaming,
    /// For many: it is never a copy, since device and CPU use it with no call in between.
    Long,
}

/// A device's part in its domain's pools.
pub(crate) struct Bouncer<T: Address> {
    pub(crate) client: Client<T>,
    pub(crate) config: BounceConfig,
}

impl<T: Address> Bouncer<T> {
    pub(crate) fn new(client: Client<T>, config: BounceConfig) -> Bouncer<T> {
        Bouncer { client, config }
    }

    /// Whether a mapping that need not be a copy shall be one.
    pub(crate) fn wants(&self, mode: Mode, wanted: &Wanted<'_, T>, measured: &Measured) -> bool {
        let _ = wanted;
        if mode.chooses() {
            return measured.len <= 4096 * measured.runs;
        }
        measured.len <= self.config.threshold
    }
}
