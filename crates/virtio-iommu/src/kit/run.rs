//! The checks, one after the other.

use super::{
    Check, Failed, Mismatch, Outcome, Report, Subject,
    bench::{Bench, Stop, Verdict},
    checks::ALL,
};

/// All checks, in the order of the rules.
pub fn checks() -> Vec<Check> {
    let mut all: Vec<Check> = ALL.iter().flat_map(|checks| checks.iter().copied()).collect();
    all.sort_by_key(|check| check.rule);
    all
}

/// Runs the checks that are `wanted` on a device.
///
/// A device that does not answer fails the check, and is restarted for the next one. If that fails,
/// the remaining checks are not run, and the report says so. At the end the field `bypass` is as it
/// was.
pub fn run(subject: &mut dyn Subject, wanted: impl Fn(&Check) -> bool) -> Report {
    let mut report = Report::default();
    let mut lost: Option<Failed> = None;
    let mut bench = Bench::new(subject);
    for check in checks().iter().filter(|check| wanted(check)) {
        if lost.is_none() {
            // Whoever hangs may need a second reset.
            lost = bench.restart().or_else(|_| bench.restart()).err();
        }
        let outcome = match &lost {
            Some(failed) => Outcome::NotRun(format!("the device cannot be started: {failed}")),
            None => outcome((check.run)(&mut bench), &bench),
        };
        report.findings.push(check.finding(outcome));
    }
    bench.restore();
    report
}

fn outcome(verdict: Verdict, bench: &Bench<'_>) -> Outcome {
    match verdict {
        Ok(note) => Outcome::Pass(note),
        Err(Stop::Mismatch(mismatch)) => Outcome::Fail(mismatch),
        Err(Stop::NotApplicable(why)) => Outcome::NotApplicable(why),
        Err(Stop::Failed(failed)) => Outcome::Fail(Mismatch {
            sent: bench.steps(),
            came: failed.to_string(),
            expected: "an answer".into(),
        }),
    }
}
