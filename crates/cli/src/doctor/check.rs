//! Checks, and their results.

use clap::ValueEnum;
use serde::Serialize;

/// What a host is to be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Purpose {
    /// A device given to a driver in user space, behind the IOMMU.
    Vfio,
    /// Memory pinned through io_uring.
    Pin,
    /// Back ends for front ends such as QEMU: `ringfence blk` and `ringfence net`.
    VhostUser,
    All,
}

impl Purpose {
    pub(super) const EACH: [Purpose; 3] = [Purpose::Vfio, Purpose::Pin, Purpose::VhostUser];

    /// Its name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().expect("none is left out").get_name().to_owned()
    }
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// Present.
    Ok,
    /// For information; nothing depends on it.
    Note,
    /// It works, but is dangerous.
    Warning,
    /// Not visible from here; a purpose that needs it is not ready, as with a lack.
    Unknown,
    /// Missing.
    Lack,
}

/// A way to fix a lack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Remedy {
    /// When it applies, and what it does.
    pub(super) text: String,
    /// Shell commands, to be run as root unless stated otherwise. Words in capitals stand for what
    /// only the user knows.
    pub(super) commands: Vec<String>,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: String,
    /// The purposes that need it.
    #[serde(rename = "for")]
    pub(super) needed_for: &'static [Purpose],
    pub(super) state: State,
    pub(super) found: String,
    pub(super) remedies: Vec<Remedy>,
}

impl Check {
    pub(super) fn new(
        name: impl Into<String>,
        needed_for: &'static [Purpose],
        state: State,
        found: impl Into<String>,
    ) -> Check {
        Check { name: name.into(), needed_for, state, found: found.into(), remedies: Vec::new() }
    }

    pub(super) fn remedy<C: Into<String>>(
        mut self,
        text: impl Into<String>,
        commands: impl IntoIterator<Item = C>,
    ) -> Check {
        let commands = commands.into_iter().map(Into::into).collect();
        self.remedies.push(Remedy { text: text.into(), commands });
        self
    }

    /// A remedy without commands.
    pub(super) fn advice(self, text: impl Into<String>) -> Check {
        self.remedy(text, [""; 0])
    }

    /// Whether a purpose that needs it cannot be called ready.
    pub(super) fn is_blocking(&self) -> bool {
        matches!(self.state, State::Lack | State::Unknown)
    }
}

/// Formats a number of bytes in the largest unit that is not larger than it.
pub(super) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (bytes.checked_ilog2().unwrap_or(0) / 10) as usize;
    let unit_bytes = 1u64 << (10 * unit);
    match (bytes / unit_bytes, bytes % unit_bytes) {
        (whole, 0) => format!("{whole} {}", UNITS[unit]),
        // Rounded down to a tenth, so that it never shows more than there is.
        (whole, rest) => {
            format!("{whole}.{} {}", u128::from(rest) * 10 / u128::from(unit_bytes), UNITS[unit])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_printed_in_their_unit() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (8 << 20, "8 MiB"),
            ((8 << 20) + (1 << 19), "8.5 MiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
