//! `ringfence bench iotlb`.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_lab::bench::iotlb::{
    self, Options,
    params::{Entries, Implementation, Merge, Order, Page},
    table,
};

use super::{or, show_rows};
use crate::lab::{
    list::{List, list},
    session::{Begun, Session},
};

/// Rounds and their length for which the default run takes under 90 seconds.
const DEFAULT_REPEAT: u32 = 7;
const DEFAULT_BUDGET: Duration = Duration::from_millis(8);

/// Measures lookups in a device's IOTLB, against other implementations in the same run.
///
/// Every implementation is filled with adjacent entries, which either continue each other
/// (mergeable) or never do (unmergeable), is checked, and is timed in rounds in which all take
/// turns. The target memory is not touched.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench iotlb
    ringfence bench iotlb --order random --merge unmergeable --page 4k
    ringfence bench iotlb --impl ringfence,vm-memory --order threads --entries 64,64k
    ringfence bench iotlb --repeat 15 --budget 20 --json iotlb.json

EXIT STATUS:
    0   done
    1   an implementation found something else than what was put in, or Ctrl-C
    2   wrong usage: nothing was run")]
pub(crate) struct Arguments {
    /// The implementations to measure, separated by commas: ringfence, vm-memory, btreemap,
    /// sorted-list (walked from its beginning, 2,048 entries at most), single-lock [default: all].
    #[arg(long = "impl", value_name = "LIST", value_parser = list::<Implementation>)]
    implementations: Option<List<Implementation>>,

    /// Numbers of entries, up to 1024k [default: 1,4,64,512,2k,64k; for threads 512].
    #[arg(long, value_name = "LIST", value_parser = list::<Entries>)]
    entries: Option<List<Entries>>,

    /// Sizes of entries: 4k, 2m, 1g [default: all; other orders than random for 4k only].
    #[arg(long, value_name = "LIST", value_parser = list::<Page>)]
    page: Option<List<Page>>,

    /// What an operation is: `seq` (64 bytes of one entry after the other), `random` (of a random
    /// one), `dependent` (the same, each after the one before), `chain` (three descriptors),
    /// `churn` (an entry is invalidated, inserted again and looked up), `threads` (random, by one
    /// thread and by two, an entry invalidated now and then), `steady` (the same, while another
    /// thread invalidates 10,000 a second) [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Order>)]
    order: Option<List<Order>>,

    /// How entries are related: mergeable, unmergeable [default: both].
    #[arg(long, value_name = "LIST", value_parser = list::<Merge>)]
    merge: Option<List<Merge>>,

    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// How long one measurement runs, milliseconds [default: 8].
    #[arg(long, value_name = "MS", value_parser = super::parse_budget)]
    budget: Option<Duration>,

    #[command(flatten)]
    session: Session,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;
    let options = Options {
        implementations: or(&arguments.implementations, Implementation::ALL),
        entries: or(&arguments.entries, Entries::DEFAULTS),
        pages: or(&arguments.page, Page::ALL),
        orders: or(&arguments.order, Order::ALL),
        merges: or(&arguments.merge, Merge::ALL),
        // A given order and a given size select the combination of both.
        all: arguments.order.is_some() && arguments.page.is_some(),
        repeat: arguments.repeat,
        budget: arguments.budget.unwrap_or(DEFAULT_BUDGET),
        progress,
    };
    let benchmark = iotlb::run(&options, &stop)?;
    show_rows(benchmark, json, progress, table::render)
}
