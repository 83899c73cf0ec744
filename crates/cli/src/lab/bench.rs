//! `ringfence bench`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use ringfence_lab::bench::{Measure, blk, bounce, iotlb, iova, map, net, pin};

use super::session::{Begun, Session, conclude, unprinted};
use crate::output::{Output, write_json};

/// What can be measured.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Allocators of I/O virtual addresses
    ///
    /// Every allocator is made and filled anew for each live set and size. Then, for each pattern, the
    /// ranges that it returns are checked against a separate record (a range returned twice fails the
    /// run; a request that fails although a hole is free is counted), and it is timed in rounds in
    /// which all take turns. An operation is one alloc and one free.
    Iova(Of<iova::Options>),
    /// Bounce pools: copying against mapping, and against pools of another shape
    ///
    /// `seed`: sequential reads and writes, 64 deep, by block size, for the rows off, strict,
    /// strict+map, lazy-mq+map, bounce, auto and persistent, between two processes over a virtio-iommu,
    /// on an unpaced disk in memory. `strict` shares no syncs, whatever is submitted together.
    ///
    /// `list`: scatter lists for an untrusted disk, whose elements do not fill their granules: bounced
    /// whole, element by element in our pools, and element by element as in Linux.
    ///
    /// `pool`: our pools against one of swiotlb's shape, in one process. Both are checked, before and
    /// after, against a record of the data that each buffer must hold.
    Bounce(Of<bounce::Options>),
    /// Lookups in a device's IOTLB, with other ways to keep one beside
    ///
    /// Every implementation is filled with adjacent entries, which either continue each other
    /// (mergeable) or never do (unmergeable), is checked, and is timed in rounds in which all take
    /// turns. The target memory is not touched.
    Iotlb(Of<iotlb::Options>),
    /// Network back ends with and without a device IOTLB, beside DPDK's
    ///
    /// A virtio-net driver, which is also the vhost-user front end, loads both in turn with the same
    /// stream of 64-byte frames, each end on a CPU of its own, and checks every byte that comes back
    /// and the number of every frame. The front end resolves IOTLB misses itself, with entries of the
    /// requested size.
    ///
    /// Where Ringfence is the IOMMU too (notified), the device and its virtio-iommu are one process,
    /// and a driver maps the frames' buffers through the DMA API, with strict and other policies.
    ///
    /// DPDK's testpmd is in Debian's package dpdk-dev; without it, its rows say so.
    Net(Of<net::Options>),
    /// The block back end with and without a device IOTLB
    ///
    /// A virtio-blk driver, which is also the vhost-user front end, loads a `ringfence blk` process
    /// with requests, mostly of 4 KiB, each end on a CPU of its own, and checks what is read and
    /// written. The front end resolves IOTLB misses itself, with entries of the requested size.
    Blk(Of<blk::Options>),
    /// Pinning pages, beside one call a page; run lengths in recordings
    ///
    /// Pages are pinned by registering them as buffers of an io_uring, which every Linux machine allows
    /// a process: the kernel takes the same long-term pins as for VFIO. All implementations are checked
    /// by the kernel's own count first, then timed in rounds in which they take turns, pinning and
    /// unpinning separately.
    Pin(Of<pin::Options>),
    /// MAP and UNMAP of a virtio-iommu, beside devices of another design
    ///
    /// Our driver writes every request into a split ring; the device executes it and completes it in
    /// the ring; our device completes an UNMAP once no thread of it uses the translation any more. Each
    /// device is checked first: mapped addresses must lead to their targets, and unmapped ones nowhere.
    /// Then they are timed in rounds in which all take turns.
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
        // What did not run is said too.
        let has_text = !benchmark.rows.is_empty() || benchmark.placement.is_some();
        let text = !json.as_ref().is_some_and(Output::is_stdout) && has_text;
        let json = write_json(json, &benchmark);
        benchmark.warnings = unprinted(benchmark.warnings, progress);
        let shown = match text {
            true => self.options.print(&benchmark, self.details),
            false => String::new(),
        };
        conclude(&shown, &verdict, json)
    }
}
