//! The rules of VFIO, checked on a kernel: the same checks for the [fake](crate::fake) and the real
//! one.
//!
//! Only what can be seen through [`Type1Kernel`](ringfence_vfio::kernel::Type1Kernel) and
//! [`IommufdKernel`](ringfence_vfio::kernel::IommufdKernel) is checked; the rest (which pages are
//! pinned when, how external holders are notified) is listed as not applicable, with the reason.

mod iommufd;
mod memory;
mod type1;

use std::fmt;

use rustix::io::Errno;

pub use iommufd::iommufd;
pub use type1::type1;

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// The kernel follows the rule.
    Pass,
    /// It does not: what was expected, and what it returned.
    Fail(String),
    /// This kernel, or this interface, does not show it: why.
    NotApplicable(String),
}

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Which rule: "[L51]"; for iommufd, which has no numbers, the call.
    ///
    /// [L51]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l51
    pub rule: &'static str,
    /// What was checked.
    pub check: &'static str,
    /// The result.
    pub verdict: Verdict,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { rule, check, verdict } = self;
        match verdict {
            Verdict::Pass => write!(f, "{rule} pass: {check}"),
            Verdict::Fail(why) => write!(f, "{rule} FAIL: {check}: {why}"),
            Verdict::NotApplicable(why) => write!(f, "{rule} not applicable: {check}: {why}"),
        }
    }
}

/// The reason to stop a check.
enum Stop {
    Fail(String),
    NotApplicable(String),
}

/// The result of a check's code.
type Checked = Result<(), Stop>;

/// The kernel refused what should have succeeded.
impl From<Errno> for Stop {
    fn from(errno: Errno) -> Stop {
        Stop::Fail(format!("a call that should succeed: {errno:?}"))
    }
}

/// Stops unless the kernel returned what was expected.
#[track_caller]
fn expect<T: PartialEq + fmt::Debug>(found: T, expected: T) -> Checked {
    if found == expected {
        return Ok(());
    }
    let line = std::panic::Location::caller().line();
    Err(Stop::Fail(format!("expected {expected:?}, got {found:?} (line {line})")))
}

/// Stops since there is nothing to check.
fn not_applicable(why: &str) -> Checked {
    Err(Stop::NotApplicable(why.to_owned()))
}

fn outcome(rule: &'static str, check: &'static str, checked: Checked) -> Outcome {
    let verdict = match checked {
        Ok(()) => Verdict::Pass,
        Err(Stop::Fail(why)) => Verdict::Fail(why),
        Err(Stop::NotApplicable(why)) => Verdict::NotApplicable(why),
    };
    Outcome { rule, check, verdict }
}
