//! `ringfence bench`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use ringfence_lab::bench::{Measure, blk, bounce, iotlb, iova, map, net, pin};

use super::session::{Begun, Session, conclude, untold};
use crate::output::Output;

/// What can be measured.
#[derive(Subcommand)]
pub(crate) enum Bench {
    #[command(about = "Allocators of I/O virtual addresses")]
    Iova(Of<iova::Options>),
    #[command(about = "Bounce pools: copying against mapping, and against pools of another shape")]
    Bounce(Of<bounce::Options>),
    #[command(about = "Lookups in a device's IOTLB, with other ways to keep one beside")]
    Iotlb(Of<iotlb::Options>),
    #[command(about = "Network back ends with and without a device IOTLB, beside DPDK's")]
    Net(Of<net::Options>),
    #[command(about = "The block back end with and without a device IOTLB")]
    Blk(Of<blk::Options>),
    #[command(about = "Pinning pages, beside one call a page; run lengths in recordings")]
    Pin(Of<pin::Options>),
    #[command(about = "MAP and UNMAP of a virtio-iommu, beside devices of another design")]
    Map(Of<map::Options>),
}

/// A benchmark with its own options.
#[derive(Args)]
pub(crate) struct Of<M: Measure> {
    #[command(flatten)]
    options: M,

    /// Prints every row with all of its figures.
    #[arg(long)]
    details: bool,

    #[command(flatten)]
    session: Session,
}

pub(crate) fn run(bench: Bench) -> Result<ExitCode> {
    match bench {
        Bench::Iova(of) => of.run(),
        Bench::Bounce(of) => of.run(),
        Bench::Iotlb(of) => of.run(),
        Bench::Net(of) => of.run(),
        Bench::Blk(of) => of.run(),
        Bench::Pin(of) => of.run(),
        Bench::Map(of) => of.run(),
    }
}

impl<M: Measure> Of<M> {
    /// Writes the JSON, and prints the text (unless the JSON goes to standard output). Failures go
    /// to standard error and decide the exit status.
    fn run(self) -> Result<ExitCode> {
        let Begun { json, progress, stop } = self.session.begin()?;
        let mut benchmark = self.options.run(progress, &stop)?;
        let mut verdict: Vec<String> =
            benchmark.errors.iter().map(|error| format!("error: {error}")).collect();
        if benchmark.interrupted {
            verdict.push(match benchmark.is_empty() {
                false => "interrupted: the figures are of what was complete".to_owned(),
                true => "interrupted before anything was complete".to_owned(),
            });
        }
        let text = !json.as_ref().is_some_and(Output::is_stdout) && !benchmark.is_empty();
        let json = json.map_or(Ok(()), |output| output.write(&benchmark.json()));
        benchmark.warnings = untold(benchmark.warnings, progress);
        let shown = match text {
            true => self.options.print(&benchmark, self.details),
            false => String::new(),
        };
        conclude(&shown, &verdict, json)
    }
}
