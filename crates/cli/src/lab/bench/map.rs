//! `ringfence bench map`.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_lab::bench::map::{
    self, Options,
    params::{Batch, Implementation, Live, Op, Order},
    table,
};

use super::{or, show_rows};
use crate::lab::{
    list::{List, list},
    session::{Begun, Session},
};

/// Rounds and their length for which the default run takes half a minute.
const DEFAULT_REPEAT: u32 = 31;
const DEFAULT_BUDGET: Duration = Duration::from_millis(2);

/// Measures MAP and UNMAP of a virtio-iommu through a request queue, against devices of another
/// design.
///
/// Our driver writes every request into a split ring; the device executes it and completes it in
/// the ring; our device completes an UNMAP once no thread of it uses the translation any more. Each
/// device is checked first: mapped addresses must lead to their targets, and unmapped ones nowhere.
/// Then they are timed in rounds in which all take turns.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench map
    ringfence bench map --op one-core,two-cores --batch 64 --order contiguous
    ringfence bench map --op one-of --live 1k,1m --json map.json

EXIT STATUS:
    0   done
    1   a device did not do what it should have, or Ctrl-C
    2   wrong usage: nothing was run")]
pub(crate) struct Arguments {
    /// The devices to measure, separated by commas: ringfence, btreemap (cloud-hypervisor's
    /// design), btreemap-range (the same with a better UNMAP) [default: all].
    #[arg(long = "impl", value_name = "LIST", value_parser = list::<Implementation>)]
    implementations: Option<List<Implementation>>,

    /// What to measure: `one-core` and `two-cores` (pairs of MAP and UNMAP), `two-domains` (one
    /// thread and two), `one-of` (one mapping among many), `attach` (to a domain with many
    /// mappings), `memory` (table memory a mapping) [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Op>)]
    op: Option<List<Op>>,

    /// How many mappings are mapped and unmapped together, up to 1024 [default: 1,8,64,256].
    #[arg(long, value_name = "LIST", value_parser = list::<Batch>)]
    batch: Option<List<Batch>>,

    /// How the pages of a batch lie: contiguous, scattered [default: both; two-domains: the first].
    #[arg(long, value_name = "LIST", value_parser = list::<Order>)]
    order: Option<List<Order>>,

    /// How many mappings a domain holds, for one-of, attach and memory, up to 4m [default: 1k,1m].
    #[arg(long, value_name = "LIST", value_parser = list::<Live>)]
    live: Option<List<Live>>,

    /// Rounds.
    #[arg(long, visible_alias = "rounds", value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// How long one measurement runs, milliseconds [default: 2].
    #[arg(long, value_name = "MS", value_parser = super::parse_budget)]
    budget: Option<Duration>,

    #[command(flatten)]
    session: Session,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;
    let options = Options {
        implementations: or(&arguments.implementations, Implementation::ALL),
        ops: or(&arguments.op, Op::ALL),
        batches: or(&arguments.batch, Batch::DEFAULTS),
        orders: or(&arguments.order, Order::ALL),
        lives: or(&arguments.live, Live::DEFAULTS),
        repeat: arguments.repeat,
        budget: arguments.budget.unwrap_or(DEFAULT_BUDGET),
        progress,
    };
    let benchmark = map::run(&options, &stop)?;
    show_rows(benchmark, json, progress, table::render)
}
