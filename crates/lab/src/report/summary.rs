//! The first answer of a comparison: eight columns a job that need no legend, and which policy
//! serves best here.

use super::{
    Comparison, JobReport, Metric, PolicyResult, Reach,
    table::{fallbacks, headline, marked, title, warnings},
};
use crate::text::{columns, dash, number, percent, plain, wrap};

/// Policies this close to each other are equally fast for the advice: the part of `off` by which
/// one must be faster to be preferred.
const ALIKE: f64 = 0.02;

/// The policy that is preferred among equally fast ones: the library's default.
const DEFAULT: &str = "strict+map";

/// The summary for a terminal.
pub fn render(comparison: &Comparison) -> String {
    let mut out = wrap(&headline(comparison));
    for job in &comparison.jobs {
        out.push('\n');
        out.push_str(&wrap(&title(job)));
        out.push_str(&rows(job));
        fallbacks(job).iter().for_each(|text| out.push_str(&wrap(text)));
    }
    out.push('\n');
    if let Some(advice) = advice(&comparison.jobs) {
        out.push_str(&wrap(&advice));
    }
    out.push_str(&wrap(
        "Ratios are medians of rounds, each against the off of its own round, ± with 95 % confidence. \
         --details: all figures.",
    ));
    for warning in warnings(comparison) {
        out.push_str(&wrap(&format!("warning: {warning}")));
    }
    out
}

fn rows(job: &JobReport) -> String {
    let (unit, scale) = match job.metric {
        Metric::Bandwidth => ("MiB/s", f64::from(1 << 20)),
        Metric::Iops => ("kIOPS", 1e3),
    };
    let head = ["", unit, "of off", "±", "latency", "p99", "CPU in IOMMU", "reachable"];
    let below = ["", "", "%", "%", "of off", "ms", "code %", "after unmap"];
    let lines = [head, below].map(|line| line.map(str::to_owned).to_vec());
    let cells = job.results.iter().map(|row| {
        let figure = match job.metric {
            Metric::Bandwidth => row.bandwidth_bytes_per_s,
            Metric::Iops => row.iops,
        };
        let ratio = row.ratio(job.metric);
        let latency = row.ratio_to_off.map(|ratios| ratios.latency.median);
        let percent =
            |part: Option<f64>| part.map_or(dash(), |part| format!("{:.1}", part * 100.0));
        vec![
            marked(job, row),
            number(figure.median / scale),
            percent(ratio.map(|ratio| ratio.median)),
            percent(ratio.and_then(|ratio| ratio.half_width())),
            latency.map_or(dash(), |latency| format!("x{latency:.2}")),
            number(row.latency_ns.p99 as f64 / 1e6),
            percent(row.iommu_cpu_fraction),
            window(row),
        ]
    });
    let right = crate::text::CellAlignment::Right;
    columns(lines.into_iter().chain(cells), [(0, right), (2, right)])
}

/// How long a device reaches memory after its unmap, for a reader: `never` is kept by policy *and*
/// was found.
fn window(row: &PolicyResult) -> String {
    let Some(exposure) = &row.exposure else { return dash() };
    match exposure.reach {
        Reach::None => "never".to_owned(),
        Reach::Flush => format!("{} ms", number(longest_ms(row))),
        Reach::Persistent | Reach::Always => "always".to_owned(),
        Reach::Leaked => format!("LEAKED {} ms", number(longest_ms(row))),
    }
}

/// As the flush queue counted or as the probe found, whichever is longer.
fn longest_ms(row: &PolicyResult) -> f64 {
    let counted = row.exposure.and_then(|exposure| exposure.max_ms);
    let found = row.stale_window.map(|window| window.max_ms);
    counted.into_iter().chain(found).fold(0.0, f64::max)
}

/// A policy over all jobs.
struct Candidate {
    name: String,
    /// The least part of the throughput of `off` that it keeps.
    keeps: f64,
    reach: Reach,
    longest_ms: f64,
}

impl Candidate {
    /// `None` if a job does not have the row, or its I/O failed there.
    fn new(jobs: &[JobReport], name: String) -> Option<Candidate> {
        let mut all = Candidate { name, keeps: f64::INFINITY, reach: Reach::None, longest_ms: 0.0 };
        for job in jobs {
            let row = job.results.iter().find(|row| job.label(row) == all.name)?;
            all.keeps = all.keeps.min(row.ratio(job.metric)?.median);
            let reach = row.exposure.filter(|_| row.errors == 0)?.reach;
            all.reach = if all.reach == Reach::None { reach } else { all.reach };
            all.longest_ms = all.longest_ms.max(longest_ms(row));
        }
        Some(all)
    }
}

/// Which policy to use on this machine, and why, by the figures of this run; `None` if the run has
/// no policy that protects, or nothing to compare it with.
fn advice(jobs: &[JobReport]) -> Option<String> {
    let first = jobs.first()?;
    let labels = first.results.iter().map(|row| first.label(row));
    let all: Vec<Candidate> = labels.filter_map(|name| Candidate::new(jobs, name)).collect();
    let fastest = |reach| {
        let those = all.iter().filter(|candidate| candidate.reach == reach);
        those.max_by(|a, b| a.keeps.total_cmp(&b.keeps))
    };
    let strict = fastest(Reach::None)?;
    let default = all.iter().find(|candidate| candidate.name == DEFAULT);
    let strict = default.filter(|it| it.keeps >= strict.keeps - ALIKE).unwrap_or(strict);
    let lazy = match fastest(Reach::Flush) {
        Some(lazy) if lazy.keeps > strict.keeps + ALIKE => format!(
            "; {} would keep {}, with memory reachable for up to {} ms after its unmap",
            plain(&lazy.name),
            percent(lazy.keeps),
            number(lazy.longest_ms)
        ),
        Some(_) => format!("; no lazy policy keeps {} more", percent(ALIKE)),
        None => String::new(),
    };
    Some(format!(
        "Here: {}. It keeps {} of the unprotected throughput{}, and the device reaches nothing that \
         was unmapped{lazy}.",
        plain(&strict.name),
        percent(strict.keeps),
        if jobs.len() == 1 { "" } else { " or more in each job" },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::sample, text::WIDTH};

    #[test]
    fn the_table_has_eight_columns_and_fits_a_terminal_of_eighty() {
        let text = render(&sample::comparison());
        let table = text.lines().filter(|line| line.starts_with(' ') || line.contains(" ms"));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
        assert!(table.clone().count() >= 11, "{text}");
        let row = text.lines().find(|line| line.trim_start().starts_with("lazy-mq ")).unwrap();
        assert!(row.chars().count() <= 80, "{row}");
        let row = text.lines().find(|line| line.trim_start().starts_with("strict ")).unwrap();
        assert_eq!(row.split_whitespace().count(), 8, "{row}");
        assert!(row.ends_with("never"), "{row}");
        println!("{text}");
    }

    /// The jobs of the sample with rows for these policies and parts of `off`.
    fn advised(policies: &[(&str, f64)]) -> Option<String> {
        let mut jobs = sample::comparison().jobs;
        for job in &mut jobs {
            job.results.retain_mut(|row| {
                let wanted = policies.iter().find(|(name, _)| *name == row.policy);
                if let (Some((_, part)), Some(ratios)) = (wanted, row.ratio_to_off.as_mut()) {
                    (ratios.bandwidth.median, ratios.iops.median) = (*part, *part);
                }
                wanted.is_some()
            });
        }
        advice(&jobs)
    }

    #[test]
    fn the_default_is_advised_unless_another_strict_policy_is_faster() {
        let advice = advised(&[("off", 1.0), ("strict+map", 0.93), ("bounce", 0.94)]).unwrap();
        assert!(advice.starts_with("Here: strict+map. It keeps 93.0%"), "{advice}");
        let advice = advised(&[("off", 1.0), ("strict+map", 0.93), ("bounce", 0.96)]).unwrap();
        assert!(advice.starts_with("Here: bounce. It keeps 96.0%"), "{advice}");
    }

    #[test]
    fn a_lazy_policy_is_named_with_its_window_if_it_is_faster_and_never_advised() {
        let advice = advised(&[("off", 1.0), ("strict+map", 0.8), ("lazy-mq+map", 0.9)]).unwrap();
        assert!(advice.starts_with("Here: strict+map."), "{advice}");
        assert!(advice.contains("lazy-mq+map would keep 90.0%"), "{advice}");
        let advice = advised(&[("off", 1.0), ("strict+map", 0.8), ("lazy-mq+map", 0.81)]).unwrap();
        assert!(advice.contains("no lazy policy keeps 2.0% more"), "{advice}");
    }

    #[test]
    fn without_a_policy_that_protects_nothing_is_advised() {
        assert_eq!(advised(&[("off", 1.0), ("zero-copy", 1.0), ("lazy-mq", 0.9)]), None);
    }

    #[test]
    fn a_leak_is_never_advised_and_stands_in_the_table() {
        let mut comparison = sample::comparison();
        let rows = comparison.jobs.iter_mut().flat_map(|job| &mut job.results);
        for row in rows.filter(|row| row.policy.starts_with("strict")) {
            row.exposure.as_mut().unwrap().reach = Reach::Leaked;
        }
        let text = render(&comparison);
        assert!(text.contains("LEAKED") && !text.contains("Here: strict"), "{text}");
    }
}
