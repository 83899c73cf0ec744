//! How the buffers of frames are mapped.

use ringfence_dma::Policy;
use serde_json::{Map, Value};

use crate::bench::row::object;

/// How many neighbouring buffers a driver maps at once: as many as it sends and receives at once.
const BUNDLE: usize = 64;

/// How the driver maps the buffers of frames: one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapped {
    /// Under which policy. `off`: not at all, and the DMA API is not called.
    pub(crate) policy: Policy,
    /// How many buffers, of a page each, are one mapping. All of them are unmapped when the last of
    /// them was used.
    pub(crate) bundle: usize,
    /// How many of them lie side by side in guest memory. Others need a MAP each, though the range
    /// of addresses is one.
    pub(crate) run: usize,
}

impl Mapped {
    /// Not mapped: what others are compared to.
    pub(crate) const OFF: Mapped = Mapped { policy: Policy::Off, bundle: BUNDLE, run: BUNDLE };

    /// All rows.
    pub(crate) const ALL: [Mapped; 6] = [
        Mapped::OFF,
        Mapped { policy: Policy::StrictMap, ..Mapped::OFF },
        Mapped { policy: Policy::StrictMap, run: 1, ..Mapped::OFF },
        Mapped { policy: Policy::StrictMap, bundle: 1, run: BUNDLE },
        Mapped { policy: Policy::LazyMqMap, ..Mapped::OFF },
        Mapped { policy: Policy::Bounce, bundle: 1, run: BUNDLE },
    ];

    /// Its name.
    pub(crate) fn name(self) -> String {
        let Mapped { policy, bundle, run } = self;
        let shape = match (policy, bundle, run) {
            (Policy::Off | Policy::Bounce, ..) => String::new(),
            (_, 1, _) => "/each".to_owned(),
            (_, bundle, 1) => format!("/{bundle}/scattered"),
            (_, bundle, _) => format!("/{bundle}"),
        };
        format!("notified/{policy}{shape}")
    }

    /// Its parameters, as far as they are its own.
    pub(crate) fn params(self) -> Map<String, Value> {
        object([
            ("policy", self.policy.name().into()),
            ("bundle", self.bundle.into()),
            ("page_run", self.run.into()),
        ])
    }

    /// Whether addresses are translated.
    pub(crate) fn translated(self) -> bool {
        self.policy != Policy::Off
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_in_name_and_the_base_is_first() {
        let names = Mapped::ALL.map(Mapped::name);
        assert_eq!(names[0], "notified/off");
        assert!(names.contains(&"notified/strict+map/64".to_owned()), "{names:?}");
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name}");
        }
    }
}
