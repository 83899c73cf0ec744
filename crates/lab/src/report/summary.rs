//! The first table of a comparison: eight columns a job that need no legend, and which policy
//! serves best here.

use super::{
    Comparison, JobReport, PolicyResult, Reach,
    table::{fallbacks, marked, title, warnings},
};
use crate::{
    stats::Estimate,
    text::{Column, dash, number, percent, plain, table, wrap},
};

/// Policies this close to each other, in parts of `off`, are equally fast for the advice, however
/// sure the figures are.
const ALIKE: f64 = 0.02;

/// The policy that is preferred among equally fast ones: the library's default.
const DEFAULT: &str = "strict+map";

/// A job's table for a terminal.
pub fn job(job: &JobReport) -> String {
    let mut out = format!("\n{}{}", wrap(&title(job)), rows(job));
    out.extend(fallbacks(job).iter().map(|text| wrap(text)));
    out
}

/// What follows the tables. Nothing is advised of a run in which something went wrong.
pub fn end(comparison: &Comparison, all_went_well: bool) -> String {
    let mut out = String::from("\n");
    if let Some(advice) = advice(&comparison.jobs).filter(|_| all_went_well) {
        out.push_str(&wrap(&advice));
    }
    out.push_str(&wrap(
        "Ratios are medians of rounds, each against the off of its own round, ± with 95 % confidence. \
         --details: all figures.",
    ));
    out.extend(warnings(comparison).iter().map(|text| wrap(&format!("warning: {text}"))));
    out
}

fn rows(job: &JobReport) -> String {
    let percent = |part: Option<f64>| part.map_or(dash(), |part| format!("{:.1}", part * 100.0));
    let ratio = |row: &PolicyResult| row.ratio(job.metric);
    let latency = |row: &PolicyResult| row.ratio_to_off.map(|ratios| ratios.latency.median);
    let columns: [Column<'_, PolicyResult, 2>; 8] = [
        (["", ""], &|row| marked(job, row)),
        ([job.metric.unit(), ""], &|row| number(row.throughput(job.metric))),
        (["of off", "%"], &|row| percent(ratio(row).map(|ratio| ratio.median))),
        (["±", "%"], &|row| percent(ratio(row).and_then(|ratio| ratio.half_width()))),
        (["latency", "of off"], &|row| {
            latency(row).map_or(dash(), |of_off| format!("x{of_off:.2}"))
        }),
        (["p99", "ms"], &|row| number(row.latency_ns.p99 as f64 / 1e6)),
        (["CPU in IOMMU", "code %"], &|row| percent(row.iommu_cpu_fraction)),
        (["reachable", "after unmap"], &window),
    ];
    table(2, &columns, &job.results)
}

/// How long a device reaches memory after its unmap, for a reader: `never` is kept by policy *and*
/// was found.
fn window(row: &PolicyResult) -> String {
    let Some(exposure) = &row.exposure else { return dash() };
    match exposure.reach {
        Reach::None => "never".to_owned(),
        Reach::Copies => "copies".to_owned(),
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

/// A row in the job where it keeps least of the throughput of `off`.
struct Worst<'r> {
    name: String,
    policy: &'r str,
    job: &'r str,
    keeps: Estimate,
}

impl<'r> Worst<'r> {
    /// `None` if a job does not have the row, if it ran under another policy, or if the device
    /// reached unmapped memory.
    fn of_strict(jobs: &'r [JobReport], name: &str) -> Option<Worst<'r>> {
        let of = |job: &'r JobReport| {
            let row = job.results.iter().find(|row| job.label(row) == name)?;
            let strict = row.exposure?.reach == Reach::None && row.replaced_by().is_none();
            let keeps = row.ratio(job.metric).filter(|_| strict)?;
            Some(Worst { name: name.to_owned(), policy: &row.policy, job: &job.name, keeps })
        };
        let all: Vec<Worst<'r>> = jobs.iter().map(of).collect::<Option<_>>()?;
        all.into_iter().min_by(|a, b| a.keeps.median.total_cmp(&b.keeps.median))
    }
}

/// How far two figures may be apart and count as equal: within their confidence, at the least
/// [`ALIKE`].
fn noise(one: Estimate, other: Estimate) -> f64 {
    [one, other].iter().filter_map(Estimate::half_width).fold(ALIKE, f64::max)
}

/// Which policy to use on this machine, and why, by the figures of this run; `None` if the run has
/// no policy that protects, or nothing to compare it with.
fn advice(jobs: &[JobReport]) -> Option<String> {
    let first = jobs.first()?;
    let labels = first.results.iter().map(|row| first.label(row));
    let all: Vec<Worst<'_>> = labels.filter_map(|name| Worst::of_strict(jobs, &name)).collect();
    let fastest = |of: &dyn Fn(&&Worst<'_>) -> bool| {
        let those = all.iter().filter(of);
        those.max_by(|a, b| a.keeps.median.total_cmp(&b.keeps.median))
    };
    let any = fastest(&|_| true)?;
    let default = fastest(&|row| row.policy == DEFAULT);
    let default =
        default.filter(|row| row.keeps.median >= any.keeps.median - noise(row.keeps, any.keeps));
    let best = default.unwrap_or(any);
    let more = if jobs.len() == 1 { "" } else { ", no less in the others" };
    Some(format!(
        "Here: {}. It kept {} of the unprotected throughput in {}{more}, and the device reached \
         nothing that was unmapped; {}.",
        plain(&best.name),
        kept(best.keeps),
        plain(best.job),
        lazier(jobs, &best.name)?,
    ))
}

/// What the lazy rows would gain over the row `name`, in the job where they gain most.
fn lazier(jobs: &[JobReport], name: &str) -> Option<String> {
    let mut lazy = Vec::new();
    for job in jobs {
        let strict = job.results.iter().find(|row| job.label(row) == name)?.ratio(job.metric)?;
        let rows = job
            .results
            .iter()
            .filter(|row| row.exposure.is_some_and(|exposure| exposure.reach == Reach::Flush));
        lazy.extend(rows.filter_map(|row| Some((job, row, row.ratio(job.metric)?, strict))));
    }
    if lazy.is_empty() {
        return Some("no lazy policy was measured".to_owned());
    }
    let gains = lazy.into_iter().map(|(job, row, keeps, strict)| {
        (keeps.median - strict.median, noise(strict, keeps), job, row, keeps)
    });
    let most = gains.filter(|(gain, noise, ..)| gain > noise);
    let most = most.reduce(|most, other| if other.0 > most.0 { other } else { most });
    Some(match most {
        Some((_, _, job, row, keeps)) => format!(
            "{} kept {} in {}, with memory reachable for {} ms at the longest",
            plain(&job.label(row)),
            kept(keeps),
            plain(&job.name),
            number(longest_ms(row))
        ),
        None => "no lazy policy measured here was faster by more than the noise".to_owned(),
    })
}

/// `87.0% ± 6.1`.
fn kept(ratio: Estimate) -> String {
    let half = ratio.half_width().map(|half| format!(" ± {:.1}", half * 100.0));
    percent(ratio.median) + &half.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        report::{sample, table},
        text::WIDTH,
    };

    /// All that is printed.
    fn render(comparison: &Comparison, all_went_well: bool) -> String {
        let jobs: String = comparison.jobs.iter().map(job).collect();
        format!("{}{jobs}{}", table::head(comparison), end(comparison, all_went_well))
    }

    #[test]
    fn the_table_has_eight_columns_and_fits_a_terminal_of_eighty() {
        let text = render(&sample::comparison(), true);
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
                    let sure = |median| Estimate { median, lo: Some(median), hi: Some(median) };
                    (ratios.bandwidth, ratios.iops) = (sure(*part), sure(*part));
                }
                wanted.is_some()
            });
        }
        advice(&jobs)
    }

    #[test]
    fn the_default_is_advised_unless_another_strict_policy_is_faster() {
        let advice = advised(&[("off", 1.0), ("strict+map", 0.93), ("bounce", 0.94)]).unwrap();
        assert!(advice.starts_with("Here: strict+map. It kept 93.0% ± 0.0"), "{advice}");
        let advice = advised(&[("off", 1.0), ("strict+map", 0.93), ("bounce", 0.96)]).unwrap();
        assert!(advice.starts_with("Here: bounce. It kept 96.0%"), "{advice}");
    }

    #[test]
    fn a_lazy_policy_is_named_with_its_window_if_it_is_faster_and_never_advised() {
        let advice = advised(&[("off", 1.0), ("strict+map", 0.8), ("lazy-mq+map", 0.9)]).unwrap();
        assert!(advice.starts_with("Here: strict+map."), "{advice}");
        assert!(advice.contains("lazy-mq+map kept 90.0%"), "{advice}");
        let advice = advised(&[("off", 1.0), ("strict+map", 0.8), ("lazy-mq+map", 0.81)]).unwrap();
        assert!(advice.contains("no lazy policy measured here was faster"), "{advice}");
    }

    #[test]
    fn without_a_policy_that_protects_nothing_is_advised() {
        assert_eq!(advised(&[("off", 1.0), ("zero-copy", 1.0), ("lazy-mq", 0.9)]), None);
        assert!(!render(&sample::comparison(), false).contains("Here: "));
    }

    #[test]
    fn a_lazy_policy_is_compared_job_by_job() {
        let mut jobs = sample::comparison().jobs;
        let sure = |median| Estimate { median, lo: Some(median), hi: Some(median) };
        for (job, parts) in jobs.iter_mut().zip([[0.80, 0.99], [0.75, 0.76]]) {
            job.results.retain(|row| ["off", "strict+map", "lazy-mq"].contains(&&*row.policy));
            for (row, part) in job.results[1..].iter_mut().zip(parts) {
                let ratios = row.ratio_to_off.as_mut().unwrap();
                (ratios.bandwidth, ratios.iops) = (sure(part), sure(part));
            }
        }
        let text = advice(&jobs).unwrap();
        assert!(text.contains("kept 75.0% ± 0.0 of the unprotected throughput in"), "{text}");
        assert!(text.contains("lazy-mq kept 99.0%"), "{text}");
    }

    #[test]
    fn a_row_that_ran_under_another_policy_is_not_advised() {
        let mut jobs = sample::comparison().jobs;
        for job in &mut jobs {
            job.results.retain(|row| ["off", "lazy-mq"].contains(&&*row.policy));
            let row = &mut job.results[1];
            row.effective_policy = "strict".to_owned();
            row.exposure.as_mut().unwrap().reach = Reach::None;
        }
        assert_eq!(advice(&jobs), None);
    }

    #[test]
    fn with_several_allocators_the_default_policy_is_preferred_too() {
        let mut jobs = sample::comparison().jobs;
        for job in &mut jobs {
            let mut other = job.results.iter().find(|row| row.policy == DEFAULT).unwrap().clone();
            other.allocator = Some("rbtree".to_owned());
            job.results.retain(|row| ["off", DEFAULT].contains(&&*row.policy));
            job.results.push(other);
        }
        assert!(advice(&jobs).unwrap().starts_with("Here: strict+map/"));
    }

    #[test]
    fn a_leak_is_never_advised_and_stands_in_the_table() {
        let mut comparison = sample::comparison();
        let rows = comparison.jobs.iter_mut().flat_map(|job| &mut job.results);
        for row in rows.filter(|row| row.policy.starts_with("strict")) {
            row.exposure.as_mut().unwrap().reach = Reach::Leaked;
        }
        let text = render(&comparison, true);
        assert!(text.contains("LEAKED") && !text.contains("Here: strict"), "{text}");
    }
}
