//! The conformance kit against the virtio-iommu of the machine that this runs in, with QEMU's `edu`
//! devices as the endpoints behind it. No driver has the IOMMU meanwhile: this program is one, and
//! needs root.
//!
//! `viommu-kit [--json] [--only CHECK,V22,...] [--without CHECK,...]`: a line for each check and how
//! it ended, or all of it as JSON. 0 if everything was run, whatever came out: who asked judges.

mod access;
mod edu;
mod memory;
mod pci;
mod subject;
mod virtio;

use std::{cell::Cell, env, rc::Rc};

use anyhow::{Context, Result, bail};
use ringfence_virtio_iommu::kit::{self, Check, Report};
use serde_json::json;
use subject::Viommu;

/// The rule about what a device reset does.
const RESETS: u8 = 4;

fn main() -> Result<()> {
    let (mut as_json, mut only, mut without) = (false, None, Vec::new());
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
            other => bail!("{other}: what is that?"),
        }
    }
    let tidy = Rc::new(Cell::new(true));
    let mut viommu = Viommu::find(Rc::clone(&tidy))?;
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

fn print_json(report: &Report) {
    let findings = report.findings.iter().map(|finding| {
        json!({
            "rule": format!("V{}", finding.rule),
            "level": finding.level.to_string(),
            "check": finding.check,
            "says": finding.says,
            "outcome": finding.outcome.name(),
            "why": finding.outcome.why(),
        })
    });
    println!(
        "{:#}",
        json!({ "schema": "ringfence.conformance/1", "rules": findings.collect::<Vec<_>>() })
    );
}
