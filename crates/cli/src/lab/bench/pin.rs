//! `ringfence bench pin`.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Result;
use clap::Args;
use ringfence_lab::bench::pin::{
    self, Options,
    params::{Backing, Implementation, List as PageList, Pages},
    runs, table,
};

use super::{or, show_rows};
use crate::lab::{
    list::{List, list},
    session::{Begun, Session},
};

/// Rounds and their length for which the default run takes half a minute.
const DEFAULT_REPEAT: u32 = 31;
const DEFAULT_BUDGET: Duration = Duration::from_millis(1);

/// Measures pinning pages, against one call a page by hand; or how much longer runs would gain in
/// recordings of real work.
///
/// Pages are pinned by registering them as buffers of an io_uring, which every Linux machine allows
/// a process: the kernel takes the same long-term pins as for VFIO. All implementations are checked
/// by the kernel's own count first, then timed in rounds in which they take turns, pinning and
/// unpinning separately.
#[derive(Args)]
#[command(after_help = "EXAMPLES:
    ringfence bench pin
    ringfence bench pin --pages 1,512 --memory 4k,thp --list contiguous,half
    ringfence bench pin --repeat 101 --pages 1 --json pin.json
    ringfence bench pin --runs examples/traces/*.gz

HUGE PAGES:
    hugetlb needs huge pages that were set apart (sysctl vm.nr_hugepages=N): without, it is told that it
    did not run, and named by --memory that is a failure

EXIT STATUS:
    0   done
    1   somebody did not pin what it should have, memory that was named is not there, or Ctrl-C
    2   wrong usage, a file that is no recording included: nothing was run")]
pub(crate) struct Arguments {
    /// The implementations to measure, separated by commas: ringfence, page-by-page, ringfence-each
    /// (called once a page), runs-by-hand [default: all].
    #[arg(long = "impl", value_name = "LIST", value_parser = list::<Implementation>)]
    implementations: Option<List<Implementation>>,

    /// Lengths of lists, pages of 4 KiB, up to 16384 [default: 1,8,64,512,4096].
    #[arg(long, value_name = "LIST", value_parser = list::<Pages>)]
    pages: Option<List<Pages>>,

    /// What backs the memory: 4k, thp, hugetlb [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<Backing>)]
    memory: Option<List<Backing>>,

    /// How the pages lie: `contiguous`, `random` (no two adjacent), `mixed` (or `half`: half of
    /// them in runs, half alone), `pinned` (adjacent, half of them pinned already) [default: all].
    #[arg(long, value_name = "LIST", value_parser = list::<PageList>)]
    list: Option<List<PageList>>,

    /// Rounds.
    #[arg(long, visible_alias = "rounds", value_name = "N", default_value_t = DEFAULT_REPEAT,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,

    /// How long one measurement runs, milliseconds, one list at least [default: 1].
    #[arg(long, value_name = "MS", value_parser = super::parse_budget)]
    budget: Option<Duration>,

    /// Prints instead how long the runs of pages in these recordings are (those of `ringfence
    /// replay`); `-` is standard input.
    #[arg(long, value_name = "TRACE", num_args = 1..,
        conflicts_with_all = ["implementations", "pages", "memory", "list", "repeat", "budget"])]
    runs: Option<Vec<PathBuf>>,

    #[command(flatten)]
    session: Session,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Begun { json, progress, stop } = arguments.session.begin()?;
    if let Some(traces) = &arguments.runs {
        let benchmark = runs::run(traces, progress, &stop)?;
        return show_rows(benchmark, json, progress, table::render_runs);
    }
    let options = Options {
        implementations: or(&arguments.implementations, Implementation::ALL),
        pages: or(&arguments.pages, Pages::DEFAULTS),
        backings: or(&arguments.memory, Backing::ALL),
        backings_named: arguments.memory.is_some(),
        lists: or(&arguments.list, PageList::ALL),
        repeat: arguments.repeat,
        budget: arguments.budget.unwrap_or(DEFAULT_BUDGET),
        progress,
    };
    let benchmark = pin::run(&options, &stop)?;
    show_rows(benchmark, json, progress, table::render)
}
