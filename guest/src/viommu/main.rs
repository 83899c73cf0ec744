//! The conformance kit against the virtio-iommu of the machine that this runs in, with QEMU's `edu`
//! devices as the endpoints behind it. No driver has the IOMMU meanwhile: this program is one, and
//! needs root.
//!
//! `viommu-kit [--json] [--only CHECK,V22,...] [--without CHECK,...] [--absent ENDPOINT]`: a line for each check and how
//! it ended, or all of it as JSON. 0 if everything was run, whatever came out: it does not judge.

mod access;
mod edu;
mod memory;
mod pci;
mod subject;
mod virtio;

use std::{cell::Cell, env, rc::Rc};

use anyhow::{Context, Result, bail};
use ringfence_virtio_iommu::kit::{self, Check, Mismatch, Outcome, Report};
use serde_json::json;
use subject::Viommu;

/// The rule about what a device reset does.
const RESETS: u8 = 4;

fn main() -> Result<()> {
    let (mut as_json, mut only, mut without, mut absent) = (false, None, Vec::new(), None);
    let mut arguments = env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut names = || -> Result<Vec<String>> {
            let list = arguments.next().with_context(|| format!("{argument} of which checks?"))?;
            Ok(list.split(',').map(String::from).collect())
        };
        match argument.as_str() {
            "--json" => as_json = true,
            "--only" => only = Some(names()?),
            "--without" => without = names()?,
            "--absent" => absent = Some(number(&names()?.concat())?),
            other => bail!("{other}: what is that?"),
        }
    }
    let tidy = Rc::new(Cell::new(true));
    // No machine of these tests has so many buses.
    let absent = absent.unwrap_or(0xffff_fff0);
    let mut viommu = Viommu::find(absent, Rc::clone(&tidy))?;
    let named = |check: &Check, names: &[String]| {
        let rule = format!("V{}", check.rule);
        names.iter().any(|name| name == check.name || *name == rule)
    };
    let wanted = |check: &Check| {
        let wanted = only.as_ref().is_none_or(|only| named(check, only)) && !named(check, &without);
        if wanted {
            // The rule about resets is to see all that they leave behind; the others are not to
            // fail because of it.
            tidy.set(check.rule != RESETS);
            // Should the machine not survive it, this was the last word.
            eprintln!("trying {}", check.name);
        }
        wanted
    };
    let report = kit::run(&mut viommu, wanted);
    if as_json {
        print_json(&report)
    } else {
        print(&report)
    }
    Ok(())
}

fn number(text: &str) -> Result<u32> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.with_context(|| format!("{text} is no number of an endpoint"))
}

fn print(report: &Report) {
    for finding in &report.findings {
        let why = finding.outcome.why().unwrap_or_default();
        let (rule, level, outcome) = (finding.rule, finding.level, finding.outcome.name());
        println!("V{rule:<3} {level:<7} {outcome:<15} {}: {}", finding.check, finding.says);
        if !why.is_empty() {
            println!("     {why}");
        }
    }
}

/// What `ringfence conformance --json` writes, as far as it is known here.
fn print_json(report: &Report) {
    let findings = report.findings.iter().map(|finding| {
        let mismatch = match &finding.outcome {
            Outcome::Fail(Mismatch { sent, came, expected }) => {
                Some(json!({ "sent": sent, "came": came, "expected": expected }))
            }
            _ => None,
        };
        json!({
            "rule": format!("V{}", finding.rule),
            "level": finding.level.to_string(),
            "check": finding.check,
            "says": finding.says,
            "outcome": finding.outcome.name(),
            "why": finding.outcome.why(),
            "mismatch": mismatch,
        })
    });
    let rules: Vec<_> = findings.collect();
    println!(
        "{:#}",
        json!({
            "schema": "ringfence.conformance/1",
            "device": "the virtio-iommu of this machine",
            "conforms": report.conforms(false),
            "rules": rules,
        })
    );
}
