//! The contract of any [`Domain`], as checks from a device's point of view: by accesses.
//!
//! A [`Subject`] is a domain and a device behind it. [`run`] runs all [`checks`], each in granules
//! that it has emptied by an unmap, and returns their outcomes. It is for the tests of a domain.

mod bench;
mod cache;
mod list;
mod subject;

pub use cache::Cache;
pub use list::{Check, checks};
use ringfence_iommu::Domain;
pub use subject::{MEMORY, Subject};

use bench::{Area, Bench, Stop};

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The domain keeps the contract.
    Pass,
    /// It violates the contract.
    Fail(String),
    /// The check does not apply, and why.
    NotApplicable(&'static str),
}

/// A check and how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The name of the check.
    pub check: &'static str,
    /// How it ended.
    pub verdict: Verdict,
}

/// Runs all checks, and returns the names of those that do not apply.
///
/// # Errors
/// The checks that the domain fails, each with the reason; or as [`run`].
pub fn pass<S: Subject>(subject: &mut S) -> Result<Vec<&'static str>, String> {
    let (mut left, mut failed) = (Vec::new(), String::new());
    for Outcome { check, verdict } in run(subject)? {
        match verdict {
            Verdict::Pass => {}
            Verdict::Fail(why) => failed.push_str(&format!("{check}: {why}\n")),
            Verdict::NotApplicable(_) => left.push(check),
        }
    }
    if failed.is_empty() { Ok(left) } else { Err(failed) }
}

/// Runs all checks.
///
/// # Errors
/// The domain has no [`MEMORY`] granules in a row, from a multiple of that size on, that could be
/// mapped, or they cannot be emptied.
pub fn run<S: Subject>(subject: &mut S) -> Result<Vec<Outcome>, String> {
    let area = Area::of(&subject.domain().geometry()).ok_or("no room for the checks")?;
    let mut outcomes = Vec::new();
    for check in checks::<S>() {
        let mut bench = Bench { subject, area };
        bench.empty()?;
        let verdict = match (check.run)(&mut bench) {
            Ok(()) => Verdict::Pass,
            Err(Stop::Fail(why)) => Verdict::Fail(why),
            Err(Stop::NotApplicable(why)) => Verdict::NotApplicable(why),
        };
        outcomes.push(Outcome { check: check.name, verdict });
    }
    Ok(outcomes)
}
