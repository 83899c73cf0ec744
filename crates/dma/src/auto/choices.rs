//! What was chosen, and why, for people and programs to read.

use core::fmt;

use crate::{Direction, Error};

/// What [`Policy::Auto`](crate::Policy::Auto) chose for each kind of mapping, and why. Its
/// `Display` is a table.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    /// What was measured when the policy came into force.
    pub calibration: Calibration,
    /// The kinds of mappings so far, in no particular order.
    pub cells: Vec<CellChoice>,
}

/// What copying and mapping cost, measured when the policy came into force.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// The cost of a copy, the smallest first; sizes for which there was no slot or no time are
    /// missing.
    pub copies: Vec<CopyCost>,
    /// Wall time to map and unmap in a batch, in nanoseconds: of the calls alone, without the cost
    /// per piece and without waiting for syncs, as no thread waits for them then.
    pub map_call_ns: Option<u64>,
    /// The same for each granule.
    pub map_run_ns: Option<u64>,
    /// Wall time that each further granule of a batch adds, syncs included, in nanoseconds: what
    /// the device takes for it, if that is longer than the calls.
    pub map_wall_ns: Option<u64>,
    /// Wall time to map and unmap one granule with its own two syncs, in nanoseconds.
    pub map_lone_ns: Option<u64>,
    /// How long the calibration took, in nanoseconds.
    pub took_ns: u64,
    /// Why a part of it is missing.
    pub failed: Option<Error>,
}

/// The cost of a copied mapping of a size, from map to unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyCost {
    /// How many bytes.
    pub bytes: u64,
    /// Wall time when the device reads them, in nanoseconds.
    pub in_ns: u64,
    /// Wall time when the device writes them, scrubbing the slot included, in nanoseconds.
    pub out_ns: u64,
}

/// What was chosen for one kind of mapping.
#[derive(Clone, Debug, PartialEq)]
pub struct CellChoice {
    /// Which way the data goes.
    pub direction: Direction,
    /// The size class: mappings of more than half this many bytes and at most this many, a power of
    /// two. The smallest class (512 B) includes all shorter ones, the largest (1 MiB) all longer
    /// ones.
    pub bytes: u64,
    /// Whether its mappings are several runs of memory, rather than one.
    pub scattered: bool,
    /// How many were copied so far.
    pub copied: u64,
    /// How many were mapped so far, including those that found no slot.
    pub mapped: u64,
    /// Whether mappings are copies now.
    pub copies: bool,
    /// Why.
    pub reason: ChoiceReason,
}

/// Why mappings of a kind are copied, or mapped.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ChoiceReason {
    /// They are mapped: the calibration failed.
    Unknown,
    /// The chosen way costs less, by the calibration.
    Cost {
        /// What a copy is expected to cost, in nanoseconds.
        copy_ns: u64,
        /// What a map and its unmap are expected to cost, in nanoseconds.
        map_ns: u64,
    },
    /// They are copied: a map costs more in use, as threads wait for its syncs.
    Waits {
        /// What a copy is expected to cost, in nanoseconds.
        copy_ns: u64,
        /// What the calls of a map and its unmap are expected to cost, and what threads waited for a
        /// mapping of any kind, on average: together, in nanoseconds.
        map_ns: u64,
    },
    /// More was done in the same time when all mappings, of any kind, went this way.
    Faster {
        /// How many percent more, in bytes.
        percent: u32,
    },
    /// Other threads want the CPU: a copy waits for no other thread, and takes less time than
    /// waking one.
    Shared,
}

impl fmt::Display for ChoiceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ChoiceReason::Unknown => write!(f, "the calibration failed"),
            ChoiceReason::Cost { copy_ns, map_ns } => {
                write!(f, "calibrated: copy {}, map {}", Time(copy_ns), Time(map_ns))
            }
            ChoiceReason::Waits { copy_ns, map_ns } => {
                write!(f, "in use: copy {}, map {} with waits", Time(copy_ns), Time(map_ns))
            }
            ChoiceReason::Faster { percent } => {
                write!(f, "in use: {percent} % faster, with all mappings alike")
            }
            ChoiceReason::Shared => write!(f, "the CPU is shared, and a copy waits for no thread"),
        }
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "calibrated in {}:", Time(self.took_ns))?;
        match (self.map_call_ns, self.map_run_ns, self.map_wall_ns, self.map_lone_ns) {
            (Some(call), Some(run), Some(wall), Some(lone)) => {
                let [call, run, wall, lone] = [call, run, wall, lone].map(Time);
                write!(
                    f,
                    " map and unmap {call} and {run} a granule in a batch ({wall} with the \
                           device's work), {lone} alone"
                )?;
            }
            _ => write!(f, " mapping could not be measured")?,
        }
        match self.failed {
            Some(error) => writeln!(f, " ({error})")?,
            None => writeln!(f)?,
        }
        for CopyCost { bytes, in_ns, out_ns } in &self.copies {
            let size = Size(*bytes).to_string();
            writeln!(f, "  copy {size:>8}: in {}, out {}", Time(*in_ns), Time(*out_ns))?;
        }
        Ok(())
    }
}

impl fmt::Display for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.calibration)?;
        writeln!(
            f,
            "{:<13} {:>8} {:<7} {:<4} {:>12} {:>12}  why",
            "direction", "up to", "runs", "now", "copied", "mapped"
        )?;
        for cell in &self.cells {
            let direction = match cell.direction {
                Direction::ToDevice => "to device",
                Direction::FromDevice => "from device",
                Direction::Bidirectional => "bidirectional",
            };
            let (size, runs) = (Size(cell.bytes).to_string(), ["one", "several"]);
            let runs = runs[usize::from(cell.scattered)];
            let (now, copied, mapped) =
                (if cell.copies { "copy" } else { "map" }, cell.copied, cell.mapped);
            writeln!(
                f,
                "{direction:<13} {size:>8} {runs:<7} {now:<4} {copied:>12} {mapped:>12}  {}",
                cell.reason
            )?;
        }
        Ok(())
    }
}

struct Time(u64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns @ 0..1000 => write!(f, "{ns} ns"),
            ns @ 1000..1_000_000 => write!(f, "{:.1} us", ns as f64 / 1e3),
            ns => write!(f, "{:.1} ms", ns as f64 / 1e6),
        }
    }
}

struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >> 20 > 0 => write!(f, "{} MiB", bytes >> 20),
            bytes if bytes >> 10 > 0 => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{bytes} B"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_what_was_chosen_and_why() {
        let cell = |copies, reason| CellChoice {
            direction: Direction::FromDevice,
            bytes: 65536,
            scattered: true,
            copied: 7,
            mapped: 9,
            copies,
            reason,
        };
        let choices = Choices {
            calibration: Calibration {
                copies: vec![CopyCost { bytes: 1 << 20, in_ns: 80_000, out_ns: 1_500_000 }],
                failed: Some(Error::Bounce(4096)),
                took_ns: 950,
                ..Calibration::default()
            },
            cells: vec![
                cell(false, ChoiceReason::Cost { copy_ns: 900, map_ns: 400 }),
                cell(true, ChoiceReason::Waits { copy_ns: 900, map_ns: 4000 }),
                cell(true, ChoiceReason::Faster { percent: 31 }),
                cell(true, ChoiceReason::Shared),
            ],
        };
        let table = choices.to_string();
        for wanted in [
            "calibrated in 950 ns: mapping could not be measured",
            "copy    1 MiB: in 80.0 us, out 1.5 ms",
            "from device     64 KiB several map             7            9  calibrated: copy 900 ns, map 400 ns\n",
            "copy            7            9  in use: copy 900 ns, map 4.0 us with waits\n",
            "copy            7            9  in use: 31 % faster, with all mappings alike\n",
            "copy            7            9  the CPU is shared, and a copy waits for no thread\n",
        ] {
            assert!(table.contains(wanted), "{wanted:?} is missing in\n{table}");
        }
    }
}
