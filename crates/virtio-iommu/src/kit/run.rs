//! The checks, one after the other.

use super::{
    Failed, Finding, Mismatch, Outcome, Report, Subject,
    bench::{Bench, Check, Stop},
    checks::ALL,
};

/// All checks, in the order of the rules.
pub fn checks() -> Vec<Check> {
    let mut all = ALL.concat();
    all.sort_by_key(|check| check.rule);
    all
}

/// Runs the checks that are `wanted` on a device.
///
/// A device that does not reply fails the check, and is restarted for the next one. If that fails,
/// the remaining checks are not run ([`Outcome::NotRun`]). At the end the device is reset and the
/// field `bypass` as it was, unless the device is lost.
pub fn run(subject: &mut dyn Subject, wanted: impl Fn(&Check) -> bool) -> Report {
    let mut report = Report::default();
    let mut lost: Option<Failed> = None;
    let mut bench = Bench::new(subject);
    for check in checks().iter().filter(|check| wanted(check)) {
        if lost.is_none() {
            // A device that hangs may need a second reset.
            lost = bench.restart().or_else(|_| bench.restart()).err();
        }
        let outcome = match &lost {
            Some(failed) => Outcome::NotRun(format!("the device cannot be started: {failed}")),
            None => match bench.needs(check.needs).and_then(|()| (check.run)(&mut bench)) {
                Ok(()) => Outcome::Pass(bench.note.take()),
                Err(Stop::Mismatch(mismatch)) => Outcome::Fail(mismatch),
                Err(Stop::NotApplicable(why)) => Outcome::NotApplicable(why),
                Err(Stop::Failed(failed)) => Outcome::Fail(Mismatch {
                    sent: bench.steps(),
                    came: failed.to_string(),
                    expected: "a reply".into(),
                }),
            },
        };
        let &Check { rule, level, name, says, .. } = check;
        report.findings.push(Finding { rule, level, check: name, says, outcome });
    }
    bench.restore();
    report
}
