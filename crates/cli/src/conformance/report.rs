//! Findings, as text and as JSON.

use std::{collections::BTreeMap, fmt::Write as _};

use ringfence_virtio_iommu::kit::{Finding, Level, Mismatch, Outcome, Report};
use serde_json::{Value, json};

/// How many findings there are of each kind, by the names that JSON has for these.
fn counts(report: &Report) -> [(&'static str, usize); 6] {
    let failed = |level| report.failed(level).count();
    [
        ("pass", report.count("pass")),
        ("must_fail", failed(Level::Must)),
        ("should_fail", failed(Level::Should)),
        ("may_fail", failed(Level::May)),
        ("not_applicable", report.count("not applicable")),
        ("not_run", report.count("not run")),
    ]
}

/// A finding as JSON.
fn row(finding: &Finding) -> Value {
    let Finding { rule, level, check, says, outcome } = finding;
    let mut row = json!({
        "rule": format!("V{rule}"),
        "level": level.to_string(),
        "check": check,
        "says": says,
        "outcome": outcome.name(),
    });
    if let Some(why) = outcome.why() {
        row["why"] = why.into();
    }
    if let Outcome::Fail(Mismatch { sent, came, expected }) = outcome {
        row["mismatch"] = json!({ "sent": sent, "came": came, "expected": expected });
    }
    row
}

/// The findings as JSON.
pub(super) fn to_json(report: &Report, device: &str, strict: bool) -> Value {
    json!({
        "schema": "ringfence.conformance/1",
        "device": device,
        "strict": strict,
        "conforms": report.conforms(strict),
        "counts": BTreeMap::from(counts(report)),
        "rules": report.findings.iter().map(row).collect::<Vec<_>>(),
    })
}

/// The findings as text.
pub(super) fn to_text(report: &Report, device: &str, strict: bool) -> String {
    let mut out = String::new();
    let mut line = |text: &str| writeln!(out, "{}", text.trim_end()).expect("a String takes all");
    line(&format!("virtio-iommu at {device}, by section 5.13 of virtio 1.3"));
    line("");
    for finding in &report.findings {
        let Finding { rule, level, says, outcome, .. } = finding;
        let word = match outcome {
            Outcome::Fail(_) => "FAIL",
            Outcome::NotRun(_) => "NOT RUN",
            Outcome::NotApplicable(_) => "n/a",
            Outcome::Pass(_) => "pass",
        };
        line(&format!("{word:<8}{:<5}{level:<7} {says}", format!("V{rule}")));
        match outcome {
            Outcome::Fail(mismatch) => {
                line(&format!("        {:<13}{}", "after", mismatch.sent));
                line(&format!("        {:<13}{}", "expected", mismatch.expected));
                line(&format!("        {:<13}{}", "got", mismatch.came));
                line(&format!("        {:<13}{}", "check", finding.check));
            }
            other => {
                if let Some(why) = other.why() {
                    line(&format!("        {:<13}{why}", ""));
                }
            }
        }
    }
    let [pass, must_fail, should_fail, may_fail, not_applicable, not_run] =
        counts(report).map(|(_, count)| count);
    line("");
    line(&format!(
        "{pass} pass, {} fail ({must_fail} must, {should_fail} should, {may_fail} may), \
         {not_applicable} not applicable, {not_run} not run",
        must_fail + should_fail + may_fail
    ));
    let failed = must_fail + should_fail + may_fail > 0;
    line(match report.conforms(strict) {
        true if should_fail > 0 => "conforms: what fails is what a device should do, not must",
        true => "conforms",
        false if report.is_cut_short() => "not judged: the device was lost before the end",
        false if !failed => "not judged: none of the checks applies",
        false => "does not conform",
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(level: Level, outcome: Outcome) -> Finding {
        Finding { rule: 22, level, check: "a-check", says: "it does", outcome }
    }

    fn report(findings: impl IntoIterator<Item = Finding>) -> Report {
        Report { findings: findings.into_iter().collect() }
    }

    fn mismatch() -> Outcome {
        let words = ["UNMAP: OK", "OK", "RANGE"].map(String::from);
        let [sent, came, expected] = words;
        Outcome::Fail(Mismatch { sent, came, expected })
    }

    #[test]
    fn a_failure_is_printed_with_what_was_sent_and_expected() {
        let found =
            report([finding(Level::Should, mismatch()), finding(Level::Must, Outcome::Pass(None))]);
        let text = to_text(&found, "x.sock", false);
        for part in ["x.sock", "FAIL", "V22", "should", "UNMAP: OK", "RANGE", "1 pass, 1 fail"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(text.contains("\nconforms: what fails"), "{text}");
        assert!(to_text(&found, "x.sock", true).ends_with("does not conform\n"));
        let json = to_json(&found, "x", true);
        assert_eq!(json["schema"], "ringfence.conformance/1");
        assert_eq!(json["conforms"], false);
        let row = &json["rules"][0];
        assert_eq!((&row["rule"], &row["level"]), (&"V22".into(), &"should".into()));
        assert_eq!(
            (&row["outcome"], &row["why"]),
            (&"fail".into(), &"UNMAP: OK: expected RANGE, got OK".into())
        );
        assert_eq!(row["mismatch"]["expected"], "RANGE");
        assert_eq!(json["rules"][1]["why"], serde_json::Value::Null);
    }

    #[test]
    fn a_device_that_fails_all_does_not_conform() {
        let text = to_text(&report([finding(Level::Must, mismatch())]), "x", false);
        assert!(text.ends_with("does not conform\n"), "{text}");
    }

    #[test]
    fn a_device_that_was_lost_is_not_judged() {
        let lost = Outcome::NotRun("it is gone".into());
        let found = report([finding(Level::Must, Outcome::Pass(None)), finding(Level::May, lost)]);
        let text = to_text(&found, "x", false);
        assert!(text.contains("NOT RUN") && text.contains("it is gone"), "{text}");
        assert!(text.ends_with("not judged: the device was lost before the end\n"), "{text}");
        let nothing = finding(Level::Must, Outcome::NotApplicable("not offered".into()));
        assert!(to_text(&report([nothing]), "x", false).ends_with("checks applies\n"));
    }
}
