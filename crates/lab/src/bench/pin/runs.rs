//! How long runs are in recordings of real work: what a pinner that takes runs would gain.
//!
//! A recording is read as `replay` reads it. What a pinner sees depends on where it stands and on
//! how much it gets at once, so several lengths are given, all in pages:
//!
//! | measure | a run is |
//! |---|---|
//! | `map` | what was mapped at once: side by side in I/O virtual addresses and in memory |
//! | `buffer` | what one unmap removes and lies side by side: what a driver asked to be mapped at once |
//! | `burst` | what lies side by side of all buffers mapped between two unmaps: what a driver that batches could hand over at once |
//! | `burst memory` | the same, side by side in the memory that is mapped: what is pinned where pins are by guest-physical address |
//! | `in flight` | for each buffer, what it lies in when it has been mapped, together with all that is mapped then |
//!
//! In a burst pages are taken in order of their addresses, and one that comes twice counts once.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::set::PAGE;
use crate::{
    bench::{
        Benchmark, Row,
        report::{Figure, Part, Sheet},
        rounds::{Stop, stopped},
        row::object,
    },
    progress::Kind,
    ranges::Ranges,
    replay::{self, Recording, Stream},
};

/// Lengths from which on runs are counted apart.
const FROM: [u64; 5] = [2, 8, 16, 64, 512];

/// Reads recordings and counts how long runs are in them; `-` is standard input.
///
/// # Errors
/// A file cannot be read, or is no recording ([`Usage`](crate::run::Usage)).
pub fn run(traces: &[PathBuf], progress: Kind, stop: &Stop) -> Result<Benchmark> {
    let mut benchmark = Benchmark::new("pin", 0);
    let recordings = replay::read(traces, progress, stop, &mut benchmark.warnings)?;
    benchmark.rows =
        recordings.iter().flat_map(|(file, recording)| rows(file, recording)).collect();
    benchmark.interrupted = stopped(stop);
    Ok(benchmark)
}

/// Lengths of runs, and how often each came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Lengths(BTreeMap<u64, u64>);

impl Lengths {
    fn add(&mut self, pages: u64) {
        *self.0.entry(pages).or_default() += 1;
    }

    fn runs(&self) -> u64 {
        self.0.values().sum()
    }

    fn pages(&self) -> u64 {
        // Of a recording with the whole address space in it, as many as there can be.
        self.0.iter().fold(0, |sum, (pages, runs)| sum.saturating_add(pages.saturating_mul(*runs)))
    }

    /// The length that a part `q` (0 to 1) of the runs does not exceed.
    fn quantile(&self, q: f64) -> u64 {
        let rank = ((self.runs() as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        let mut lengths = self.0.iter();
        let found = lengths.find(|(_, runs)| {
            seen += **runs;
            seen >= rank
        });
        found.map_or(0, |(pages, _)| *pages)
    }

    /// The part of the runs, and the part of the pages, that are of at least so many pages.
    fn from(&self, pages: u64) -> (f64, f64) {
        let longer = Lengths(self.0.range(pages..).map(|(n, runs)| (*n, *runs)).collect());
        let part = |of: u64, all: u64| if all == 0 { 0.0 } else { of as f64 / all as f64 };
        (part(longer.runs(), self.runs()), part(longer.pages(), self.pages()))
    }

    /// The figures of a row, in pages. `runs`: calls, if a run is one; `pages`: calls, if a page
    /// is one; `from`: what part is in runs of at least so many pages.
    fn figures(&self) -> Map<String, Value> {
        let (runs, pages) = (self.runs(), self.pages());
        let from = FROM.map(|length| {
            let (of_runs, of_pages) = self.from(length);
            json!({ "length": length, "of_runs": of_runs, "of_pages": of_pages })
        });
        object([
            ("runs", runs.into()),
            ("pages", pages.into()),
            ("mean", if runs == 0 { 0.0 } else { pages as f64 / runs as f64 }.into()),
            ("p10", self.quantile(0.1).into()),
            ("p50", self.quantile(0.5).into()),
            ("p90", self.quantile(0.9).into()),
            ("p99", self.quantile(0.99).into()),
            ("longest", self.0.last_key_value().map_or(0, |(pages, _)| *pages).into()),
            ("from", from.to_vec().into()),
            ("histogram", self.0.iter().map(|(n, of)| json!([n, of])).collect()),
        ])
    }
}

/// How run lengths are printed.
pub const SHEET: Sheet = Sheet {
    about: "lengths of runs in recordings, in pages of 4 KiB",
    parts: &[Part {
        title: "runs",
        by: "recording",
        figures: &[
            Figure::new("runs", "runs", 1.0),
            Figure::new("pages", "pages", 1.0),
            Figure::new("mean", "mean", 1.0),
            Figure::new("p10", "p10", 1.0),
            Figure::new("p50", "p50", 1.0),
            Figure::new("p90", "p90", 1.0),
            Figure::new("p99", "p99", 1.0),
            Figure::new("longest", "most", 1.0),
            Figure::new("from/0/of_pages", "%>=2", 0.01),
            Figure::new("from/1/of_pages", "%>=8", 0.01),
            Figure::new("from/2/of_pages", "%>=16", 0.01),
            Figure::new("from/3/of_pages", "%>=64", 0.01),
            Figure::new("from/4/of_pages", "%>=512", 0.01),
            Figure::new("with_neighbour", "% beside", 0.01),
        ],
        ..Part::ALL
    }],
    legend: LEGEND,
};

const LEGEND: &str = "  map           what was mapped at once: side by side in I/O virtual addresses and in memory
  buffer        what one unmap removed: what a driver mapped at once
  burst         of all buffers mapped between two unmaps, taken as one list, what lies side by side in I/O virtual
                addresses; burst memory: in the memory itself, as pins by guest-physical address see it
  in flight     for each buffer, what it was part of when it was mapped, with all that was mapped then; % beside: of
                buffers, mapped beside another that was in flight
  mean          pages of a run (in flight: of the run that a buffer is part of); p50: half of the runs are no longer
  %>=2          pages in runs of at least 2, of all, percent
";

/// All measures of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Found {
    map: Lengths,
    buffer: Lengths,
    burst: Lengths,
    burst_memory: Lengths,
    in_flight: Lengths,
    /// Buffers that lay beside something else that was mapped when they were.
    neighbours: u64,
}

fn rows(file: &str, recording: &Recording) -> Vec<Row> {
    let found = find(&recording.stream);
    let buffers = found.buffer.runs();
    let neighbours = if buffers == 0 { 0.0 } else { found.neighbours as f64 / buffers as f64 };
    let row = |measure: &str, lengths: &Lengths| {
        let mut figures = lengths.figures();
        if measure == "in flight" {
            figures.insert("with_neighbour".to_owned(), neighbours.into());
        }
        Row {
            name: format!("{measure}/{file}"),
            implementation: "recorded".to_owned(),
            params: object([
                ("recording", file.into()),
                ("format", recording.format.name().into()),
                ("measure", measure.into()),
            ]),
            figures,
            ..Row::default()
        }
    };
    vec![
        row("map", &found.map),
        row("buffer", &found.buffer),
        row("burst", &found.burst),
        row("burst memory", &found.burst_memory),
        row("in flight", &found.in_flight),
    ]
}

/// Pages, by their numbers: from the first to the last.
type Pages = (u64, u64);

/// The pages that the bytes from `first` to `last` touch.
fn touched(first: u64, last: u64) -> Pages {
    (first / PAGE as u64, last / PAGE as u64)
}

fn find(stream: &Stream) -> Found {
    let mut found = Found::default();
    // What is mapped in each domain.
    let mut live: Vec<Ranges> = (0..stream.domains).map(|_| Ranges::default()).collect();
    // Whether an allocation is in `live`, by its slot.
    let mut held = vec![false; stream.slots];
    // What was mapped since the last unmap, with the number of its domain: addresses of two are never
    // side by side.
    let (mut iovas, mut memory) = (Vec::new(), Vec::new());
    for op in stream.ops() {
        let allocation = stream.allocation(op);
        let pages @ (first, last) = touched(allocation.first, allocation.last);
        let (domain, slot) = (usize::from(allocation.domain), allocation.slot as usize);
        if op.free {
            runs(&mut iovas, &mut found.burst);
            runs(&mut memory, &mut found.burst_memory);
            if std::mem::take(&mut held[slot]) {
                live[domain].remove(first, last);
            }
            continue;
        }
        found.buffer.add(count(pages));
        iovas.push((allocation.domain, pages));
        for piece in stream.pieces(allocation) {
            found.map.add(piece.len.div_ceil(PAGE as u64));
            let last = piece.target.saturating_add(piece.len.saturating_sub(1));
            // Memory is the same for all domains.
            memory.push((0, touched(piece.target, last)));
        }
        if let Some(run) = live[domain].insert(first, last) {
            held[slot] = true;
            found.in_flight.add(count(run));
            found.neighbours += u64::from(run != pages);
        }
    }
    runs(&mut iovas, &mut found.burst);
    runs(&mut memory, &mut found.burst_memory);
    found
}

fn count((first, last): Pages) -> u64 {
    last - first + 1
}

/// Counts the runs of `pages`, and empties it.
fn runs(pages: &mut Vec<(u16, Pages)>, into: &mut Lengths) {
    pages.sort_unstable();
    let mut add =
        |run: Option<(u16, Pages)>| run.into_iter().for_each(|(_, run)| into.add(count(run)));
    let mut run: Option<(u16, Pages)> = None;
    for (domain, (first, last)) in pages.drain(..) {
        match &mut run {
            // What is side by side, and what is there already.
            Some((of, (_, to))) if *of == domain && first <= to.saturating_add(1) => {
                *to = last.max(*to);
            }
            _ => add(run.replace((domain, (first, last)))),
        }
    }
    add(run);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::replay::stream::{Derivation, Stamp};

    /// `+2..5>7`: pages 2 to 4 are mapped to pages 7 to 9; `-2..5`: unmapped.
    fn stream(script: &str) -> Stream {
        let mut derivation = Derivation::default();
        for word in script.split_whitespace() {
            let (range, target) = word[1..].split_once('>').unwrap_or((&word[1..], "0"));
            let (from, to) = range.split_once("..").unwrap();
            let at = |text: &str| text.parse::<u64>().unwrap() * PAGE as u64;
            let (first, last) = (at(from), at(to) - 1);
            match &word[..1] {
                "+" => derivation.map(0, first, last, at(target), Stamp::default()),
                _ => derivation.unmap(0, first, last, true, Stamp::default()),
            }
        }
        derivation.finish()
    }

    fn lengths<const N: usize>(of: [(u64, u64); N]) -> Lengths {
        Lengths(of.into_iter().collect())
    }

    #[test]
    fn a_buffer_of_scattered_pages_is_one_run_of_addresses_and_several_of_memory() {
        let found = find(&stream("+0..1>9 +1..2>7 +2..4>3 -0..4"));
        assert_eq!(found.map, lengths([(1, 2), (2, 1)]));
        assert_eq!(found.buffer, lengths([(4, 1)]));
        assert_eq!(found.burst, lengths([(4, 1)]));
        assert_eq!(found.burst_memory, lengths([(1, 2), (2, 1)]));
        assert_eq!((found.in_flight, found.neighbours), (lengths([(4, 1)]), 0));
    }

    #[test]
    fn neighbours_that_come_downwards_are_a_run_too() {
        // As Linux allocates: from the top.
        let found = find(&stream("+6..8>6 +4..6>4 +2..4>20 -6..8 -4..6 -2..4"));
        assert_eq!(found.buffer, lengths([(2, 3)]));
        assert_eq!(found.burst, lengths([(6, 1)]));
        assert_eq!(found.burst_memory, lengths([(2, 1), (4, 1)]));
        assert_eq!(found.in_flight, lengths([(2, 1), (4, 1), (6, 1)]));
        assert_eq!(found.neighbours, 2);
    }

    #[test]
    fn an_unmap_ends_a_burst_and_leaves_what_is_in_flight() {
        let found = find(&stream("+0..1>0 +1..2>1 -0..1 +2..3>2 -1..2 -2..3"));
        assert_eq!(found.burst, lengths([(1, 1), (2, 1)]));
        assert_eq!(found.in_flight, lengths([(1, 1), (2, 2)]));
        assert_eq!(found.neighbours, 2);
    }

    #[test]
    fn memory_that_is_mapped_twice_is_one_run() {
        let found = find(&stream("+0..2>5 +8..9>6 -0..2 -8..9"));
        assert_eq!(found.burst_memory, lengths([(2, 1)]));
    }

    #[test]
    fn all_addresses_are_one_run() {
        let mut derivation = Derivation::default();
        derivation.map(0, 0, u64::MAX, 0, Stamp::default());
        let found = find(&derivation.finish());
        assert_eq!(found.buffer, lengths([(1 << 52, 1)]));
        assert_eq!(
            (found.burst, found.in_flight),
            (lengths([(1 << 52, 1)]), lengths([(1 << 52, 1)]))
        );
    }

    #[test]
    fn quantiles_and_shares_are_of_runs_and_of_pages() {
        let found = lengths([(1, 8), (16, 2)]).figures();
        let of = |names: &[&str]| names.iter().map(|name| found[*name].clone()).collect::<Value>();
        assert_eq!(of(&["runs", "pages", "mean"]), json!([10, 40, 4.0]));
        assert_eq!(of(&["p10", "p50", "p90", "longest"]), json!([1, 1, 16, 16]));
        let shares = found["from"].as_array().unwrap();
        let share = |length| shares.iter().find(|share| share["length"] == length).unwrap();
        assert_eq!(*share(2), json!({ "length": 2, "of_runs": 0.2, "of_pages": 0.8 }));
        assert_eq!((&share(16)["of_pages"], &share(64)["of_pages"]), (&json!(0.8), &json!(0.0)));
        let none = Lengths::default().figures();
        assert_eq!(
            (&none["runs"], &none["p50"], &none["mean"]),
            (&0.into(), &0.into(), &0.0.into())
        );
        assert_eq!(none["from"][0]["of_runs"], 0.0);
    }

    proptest! {
        #[test]
        fn runs_of_a_burst_are_those_of_a_bitmap(
            pieces in prop::collection::vec((0_u16..2, 0_u64..40, 1_u64..5), 0..30),
        ) {
            let mut bitmaps = [[false; 49]; 2];
            let mut all: Vec<(u16, Pages)> = Vec::new();
            for (domain, first, count) in pieces {
                bitmaps[usize::from(domain)][first as usize..(first + count) as usize].fill(true);
                all.push((domain, (first, first + count - 1)));
            }
            let mut expected = Lengths::default();
            for bitmap in &bitmaps {
                for run in bitmap.split(|page| !page).filter(|run| !run.is_empty()) {
                    expected.add(run.len() as u64);
                }
            }
            let mut found = Lengths::default();
            runs(&mut all, &mut found);
            prop_assert_eq!(found, expected);
        }
    }
}
