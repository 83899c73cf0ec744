//! `ringfence replay`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ringfence_lab::replay::{Ended, Options, replay, table};

use crate::lab::session::{Begun, Session, conclude, unprinted};
use crate::output::{Output, write_json};

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    options: Options,

    #[command(flatten)]
    session: Session,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;
    let show = !json.as_ref().is_some_and(Output::is_stdout);
    let Ended { mut report, failure } = replay(&arguments.options, progress, &stop)?;

    let mut verdict: Vec<String> = Vec::new();
    verdict.extend(failure.map(|failure| format!("error: {}", crate::explain(&failure))));
    if report.interrupted {
        verdict.push("interrupted: the figures are of what was complete".to_owned());
    }
    let printed = report.warnings.clone();
    report.warnings.extend(verdict.iter().cloned());
    let json = write_json(json, &report);
    report.warnings = unprinted(printed, progress);
    let shown = match show && !report.traces.is_empty() {
        true => table::render(&report),
        false => String::new(),
    };
    conclude(&shown, &verdict, json)
}
