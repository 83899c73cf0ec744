//! `ringfence conformance`.

mod report;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use crate::usage::Usage;
use anyhow::{Context, Result};
use clap::Args;
use ringfence_conformance::{Target, VhostSubject};
use ringfence_virtio_iommu::kit::{self, Check, Report};

use crate::output::{self, Output};

/// Checks how a virtio-iommu follows its specification.
///
/// Checks the device at a vhost-user socket against section 5.13 of virtio 1.3, rule by rule: what
/// it refuses and with which status, what it maps and unmaps, what PROBE and fault reports say.
/// This program plays the driver and owns the memory: no guest is needed, and none may use the
/// device meanwhile.
///
/// What endpoints can access is checked if a disk is given that the same back end serves as an
/// endpoint behind the IOMMU; without one, rules that need it are not applicable. The rules, and
/// how other devices differ from them, are in docs/conformance.md.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence conformance iommu.sock --endpoint 0x30
    ringfence conformance iommu.sock --endpoint 0x30 --blk a.sock --endpoint 0x38 --blk b.sock
    ringfence conformance iommu.sock --endpoint 0x30 --only V22,V23 --strict --json -

EXIT STATUS:
    0   no rule of level MUST is broken; with --strict, none of level SHOULD either
    1   one is, or the device was lost before all checks were made
    2   wrong usage")]
pub(crate) struct Arguments {
    /// The virtio-iommu's socket.
    socket: PathBuf,

    /// The number of an endpoint behind the device; with two, more rules can be checked.
    #[arg(long = "endpoint", value_name = "N", required = true, value_parser = number)]
    endpoints: Vec<u32>,

    /// The socket of a virtio-blk device that is an endpoint behind the IOMMU: the first --blk is the
    /// first --endpoint, and so on. Its first sector is overwritten.
    #[arg(long = "blk", value_name = "SOCKET")]
    disks: Vec<PathBuf>,

    /// A number that no endpoint has.
    #[arg(long, value_name = "N", default_value = "0xfffffff0", value_parser = number)]
    absent: u32,

    /// Checks only these rules, by number.
    #[arg(long, value_name = "RULES", value_delimiter = ',', value_parser = rule)]
    only: Vec<u8>,

    /// Treats what a device should do like what it must do.
    #[arg(long)]
    strict: bool,

    /// How long a request may take, and the report of a refused access, in milliseconds; an access
    /// that takes longer than a tenth of it counts as refused, and of an endpoint in no domain one
    /// that takes longer than a second.
    #[arg(long, value_name = "MS", default_value_t = 2000,
          value_parser = clap::value_parser!(u64).range(1..=600_000))]
    timeout: u64,

    /// Writes all findings as JSON; `-` prints the JSON instead of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    check(&arguments)?;
    ringfence_mem::sigbus::install().context("preparing for truncated memory")?;
    let json = arguments.json.as_deref().map(Output::open).transpose()?;
    let disks = arguments.disks.iter().cloned().map(Some).chain(std::iter::repeat(None));
    let mut subject = VhostSubject::open(Target {
        socket: arguments.socket.clone(),
        endpoints: arguments.endpoints.iter().copied().zip(disks).collect(),
        absent: arguments.absent,
        timeout: Duration::from_millis(arguments.timeout),
    })?;
    let only = &arguments.only;
    let wanted = |check: &Check| only.is_empty() || only.contains(&check.rule);
    let found: Report = kit::run(&mut subject, wanted);
    let device = arguments.socket.display().to_string();
    let strict = arguments.strict;
    let data = report::to_json(&found, &device, strict);
    output::report(json, &data, || report::to_text(&found, &device, strict))?;
    Ok(match found.conforms(strict) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn check(arguments: &Arguments) -> Result<(), Usage> {
    let Arguments { endpoints, disks, absent, only, .. } = arguments;
    if disks.len() > endpoints.len() {
        return Err(Usage(format!(
            "{} disks for {} endpoint{}: each --blk needs an --endpoint, in the same order",
            disks.len(),
            endpoints.len(),
            if endpoints.len() == 1 { "" } else { "s" }
        )));
    }
    if let Some(twice) = (1..endpoints.len()).find(|&n| endpoints[..n].contains(&endpoints[n])) {
        return Err(Usage(format!("--endpoint {} is given twice", endpoints[twice])));
    }
    if endpoints.contains(absent) {
        return Err(Usage(format!("--absent {absent} is one of the endpoints")));
    }
    let known = kit::checks();
    match only.iter().find(|&&rule| !known.iter().any(|check| check.rule == rule)) {
        Some(rule) => Err(Usage(format!("--only V{rule}: no check is about it"))),
        None => Ok(()),
    }
}

fn number(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| {
        format!("{text} is not the number of an endpoint: give 48 or 0x30, up to 32 bits")
    })
}

fn rule(text: &str) -> Result<u8, String> {
    let digits = text.strip_prefix(['V', 'v']).unwrap_or(text);
    digits.parse().map_err(|_| format!("{text} is not a rule: give V1 to V30"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_and_rules_have_numbers() {
        assert_eq!(number("48"), Ok(48));
        assert_eq!(number("0x30"), Ok(48));
        assert_eq!(number("0xffffffff"), Ok(u32::MAX));
        for wrong in ["", "0x", "-1", "4294967296", "disk"] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
        assert_eq!(rule("V22"), Ok(22));
        assert_eq!(rule("v3"), Ok(3));
        assert_eq!(rule("7"), Ok(7));
        for wrong in ["", "V", "VV3", "L3", "300"] {
            assert!(rule(wrong).is_err(), "{wrong}");
        }
    }
}
