//! `ringfence compare`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Args;
use ringfence_lab::{
    job::Job,
    report::{self, Comparison, PolicyRounds},
    run::{Ended, Options, compare},
};

use crate::lab::session::{Begun, Session, conclude, unprinted};
use crate::output::{Output, print, write_json};

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    options: Options,

    /// Prints every figure: intervals, times in map and unmap, requests, exposure, waits.
    #[arg(long)]
    details: bool,

    /// Writes a report with charts, one self-contained HTML file; or, for a name that ends in .svg,
    /// the price of safety as a picture.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    #[command(flatten)]
    session: Session,
}

pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    let jobs = arguments.options.jobs()?;
    let Begun { json, progress, stop } = arguments.session.begin()?;
    let report_file = arguments.report.as_deref().map(Output::open).transpose()?;
    let table = !json.iter().chain(&report_file).any(Output::is_stdout);
    // Each job's table appears when it has been measured.
    let mut printed = Ok(());
    let mut each = |comparison: &Comparison, _: &Job, _: &[PolicyRounds]| {
        let Some(job) = comparison.jobs.last().filter(|_| table) else { return };
        let mut shown = String::new();
        if comparison.jobs.len() == 1 {
            shown.push_str(&report::table::head(comparison));
        }
        shown.push_str(&match arguments.details {
            true => report::table::job(job),
            false => report::summary::job(job),
        });
        if arguments.options.explain {
            shown.push_str(&report::table::explain(job));
        }
        if printed.is_ok() {
            printed = print(&shown);
        }
    };
    let Ended { mut comparison, leaks, failure } =
        compare(jobs, &arguments.options, progress, &stop, &mut each)?;

    let measured = !comparison.jobs.is_empty();
    let mut verdict: Vec<String> = leaks.iter().map(|leak| format!("LEAK: {leak}")).collect();
    verdict.extend(failure.map(|failure| format!("error: {}", crate::explain(&failure))));
    if comparison.interrupted {
        verdict.push(match measured {
            true => "interrupted: the figures are of the rounds that were complete".to_owned(),
            false => "interrupted before a round was complete".to_owned(),
        });
    }
    let errors = comparison.errors();
    if errors > 0 {
        verdict.push(format!("error: {errors} I/Os failed or came back wrong"));
    }

    // Files outlive the terminal: they contain all warnings.
    let warnings = comparison.warnings.clone();
    comparison.warnings.extend(verdict.iter().cloned());
    let json = write_json(json, &comparison);
    let picture =
        arguments.report.as_ref().and_then(|path| path.extension()) == Some("svg".as_ref());
    let report_file = report_file.map_or(Ok(()), |output| {
        output.write(&match picture {
            true => report::picture::render(&comparison),
            false => report::html::render(&comparison),
        })
    });
    comparison.warnings = unprinted(warnings, progress);
    let shown = match (table && measured, arguments.details) {
        (false, _) => String::new(),
        (true, true) => report::table::end(&comparison),
        (true, false) => report::summary::end(&comparison, verdict.is_empty()),
    };
    conclude(&shown, &verdict, printed.and(json).and(report_file))
}
