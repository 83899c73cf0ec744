//! The outcomes of checks.

use std::fmt;

/// How much a rule binds, in the words of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Level {
    /// A device that does otherwise does not conform.
    Must,
    /// A device may deviate with good reason.
    Should,
    /// The device is free: what it does is noted. It fails only if it does not reply at all.
    May,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Level::Must => "must",
            Level::Should => "should",
            Level::May => "may",
        })
    }
}

/// Where a device differs from a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What was done to the device.
    pub sent: String,
    /// What it did.
    pub came: String,
    /// What the rule says.
    pub expected: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, got {}", self.sent, self.expected, self.came)
    }
}

/// How a check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The device follows the rule. If the rule leaves it free: what it does.
    Pass(Option<String>),
    /// It does not.
    Fail(Mismatch),
    /// The rule cannot be judged on this device or over this way to it: why.
    NotApplicable(String),
    /// The device was lost before: why.
    NotRun(String),
}

impl Outcome {
    /// The outcome in a word or two, as reports have it.
    pub fn name(&self) -> &'static str {
        match self {
            Outcome::Pass(_) => "pass",
            Outcome::Fail(_) => "fail",
            Outcome::NotApplicable(_) => "not applicable",
            Outcome::NotRun(_) => "not run",
        }
    }

    /// The explanation, if there is one.
    pub fn why(&self) -> Option<String> {
        match self {
            Outcome::Pass(note) => note.clone(),
            Outcome::Fail(mismatch) => Some(mismatch.to_string()),
            Outcome::NotApplicable(why) | Outcome::NotRun(why) => Some(why.clone()),
        }
    }
}

/// One check and how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The number of the rule: 22 for [V22].
    ///
    /// [V22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v22
    pub rule: u8,
    /// How much it binds.
    pub level: Level,
    /// The name of the check, unique: `unmap-splits-nothing`.
    pub check: &'static str,
    /// What the device must do, in a sentence.
    pub says: &'static str,
    /// How it ended.
    pub outcome: Outcome,
}

impl Finding {
    /// Whether the device fails the check.
    pub fn is_failure(&self) -> bool {
        matches!(self.outcome, Outcome::Fail(_))
    }
}

/// All findings on a device, in the order of the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// One for each check.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The checks of `level` that failed.
    pub fn failed(&self, level: Level) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.level == level && finding.is_failure())
    }

    /// How many checks ended with the outcome of this [name](Outcome::name).
    pub fn count(&self, outcome: &str) -> usize {
        self.findings.iter().filter(|finding| finding.outcome.name() == outcome).count()
    }

    /// Whether the device was lost before all checks were run.
    pub fn is_cut_short(&self) -> bool {
        self.count("not run") > 0
    }

    /// Whether the device conforms: everything was run, something was judged, no check of level
    /// MUST failed, nor one of level MAY (which fails only if there is no reply); if `strict`, no
    /// check of level SHOULD either.
    pub fn conforms(&self, strict: bool) -> bool {
        let should = if strict { self.failed(Level::Should).count() } else { 0 };
        !self.is_cut_short()
            && self.count("pass") > 0
            && self.failed(Level::Must).count() + self.failed(Level::May).count() + should == 0
    }
}
