//! The report as one file that needs nothing else: no script, no font, no image from elsewhere.
//!
//! The charts are written here rather than by a plotting crate, because their colours must follow
//! the reader's light or dark theme, which only CSS can do.

use super::{
    Comparison, JobReport, Metric, PolicyResult, curve,
    markup::{escape, family, path, put, text},
    table::{self, headline, warnings},
};
use crate::{stats::Estimate, text::number};

/// The whole page.
pub fn render(comparison: &Comparison) -> String {
    let mut page = String::with_capacity(64 << 10);
    put!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Ringfence: what DMA protection costs</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<main>\n<h1>What DMA protection costs on this machine</h1>\n\
         <p class=\"lead\">{}</p>\n{KEY}",
        escape(&headline(comparison))
    );
    for job in &comparison.jobs {
        section(&mut page, job);
    }
    preformatted(&mut page, &table::legend(comparison));
    let warnings = warnings(comparison);
    if !warnings.is_empty() {
        page.push_str("<h2>Warnings</h2>\n<ul class=\"warnings\">\n");
        for warning in warnings {
            put!(page, "<li>{}</li>\n", escape(&warning));
        }
        page.push_str("</ul>\n");
    }
    let version = escape(&comparison.version);
    put!(page, "{METHOD}<footer>ringfence {version}</footer>\n</main>\n</body>\n</html>\n");
    page
}

fn section(page: &mut String, job: &JobReport) {
    put!(page, "<section>\n<h2>{}</h2>\n", escape(&job.name));
    page.push_str("<div class=\"charts\">\n");
    let measure = match job.metric {
        Metric::Bandwidth => "Bandwidth against off",
        Metric::Iops => "I/Os a second against off",
    };
    let alone = |n: f64| Estimate { median: n, lo: None, hi: None };
    let times = |e: Estimate| {
        let half = e.half_width().map_or(String::new(), |half| format!(" ±{half:.2}"));
        format!("×{:.2}{half}", e.median)
    };
    chart(page, job, (measure, "higher is better"), Some(1.0), &|row| {
        row.ratio(job.metric).map(|e| (e, curve::percent(e)))
    });
    chart(page, job, ("Mean latency against off", "lower is better"), Some(1.0), &|row| {
        row.ratio_to_off.map(|r| (r.latency, times(r.latency)))
    });
    let hint = "each waits for the device; fewer is better";
    chart(page, job, ("Syncs per I/O", hint), None, &|row| {
        row.syncs_per_io.map(|n| (alone(n), number(n)))
    });
    let hint = "longest access that succeeded after unmap; 0 keeps the promise of strict";
    chart(page, job, ("Stale window, ms", hint), None, &|row| {
        row.stale_window.map(|w| (alone(w.max_ms), format!("{} ms", number(w.max_ms))))
    });
    curve::figure(page, job);
    page.push_str("</div>\n");
    preformatted(page, &(table::job(job) + &table::explain(job)));
    page.push_str("</section>\n");
}

/// Text as on a terminal.
fn preformatted(page: &mut String, text: &str) {
    page.push_str("<pre>\n");
    for line in text.trim_start_matches('\n').lines() {
        put!(page, "{}\n", escape(line));
    }
    page.push_str("</pre>\n");
}

/// How long a bar is, and its figure in words. `None`: does not apply, or was not measured.
type Bar = Option<(Estimate, String)>;

/// Horizontal bars from 0, one a row, with whiskers where there is an interval.
fn chart(
    page: &mut String,
    job: &JobReport,
    (title, hint): (&str, &str),
    reference: Option<f64>,
    of: &dyn Fn(&PolicyResult) -> Bar,
) {
    const ROW: f64 = 26.0;
    const WIDTH: f64 = 500.0;
    /// For the figures, on the right.
    const VALUE: f64 = 126.0;
    let bar = |row| of(row).filter(|(estimate, _)| estimate.median.is_finite());
    let bars: Vec<_> = job.results.iter().map(|row| (job.label(row), row, bar(row))).collect();
    let estimates = || bars.iter().filter_map(|(.., bar)| Some(bar.as_ref()?.0));
    // Some seven units a letter, and never less than half of the room for the bars.
    let longest = bars.iter().map(|(label, ..)| label.chars().count()).max().unwrap_or(0) as f64;
    let left = (7.2 * longest + 16.0).clamp(104.0, 240.0);
    let plot = WIDTH - VALUE - left;
    let height = ROW * bars.len() as f64 + 8.0;
    let highest = estimates().map(|e| e.median).chain(reference).fold(0.0, f64::max);
    // An interval from two rounds may reach far beyond: it is cut off rather than flatten all bars.
    let widest = estimates().filter_map(|e| e.hi).fold(highest, f64::max).min(highest * 1.4);
    let scale = if widest > 0.0 { plot / widest } else { 0.0 };
    let x = |value: f64| left + (value * scale).clamp(0.0, plot);
    put!(
        page,
        "<figure>\n<figcaption>{title}<small>{hint}</small></figcaption>\n\
             <svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\n"
    );
    for (index, (label, row, bar)) in bars.iter().enumerate() {
        let top = ROW * index as f64 + 4.0;
        let (middle, base) = (top + ROW / 2.0 - 2.0, top + ROW / 2.0 + 2.5);
        text(page, "label", left - 8.0, base, label);
        let Some((estimate, value)) = bar else {
            text(page, "none", left + 6.0, base, "–");
            continue;
        };
        put!(
            page,
            "<rect x=\"{left}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\" \
                 class=\"bar {}\"><title>{}: {}</title></rect>\n",
            top + 2.0,
            x(estimate.median) - left,
            ROW - 8.0,
            family(&row.policy),
            escape(label),
            escape(value)
        );
        if let (Some(lo), Some(hi)) = (estimate.lo, estimate.hi) {
            let (from, to, up, down) = (x(lo), x(hi), middle - 4.0, middle + 4.0);
            let ends = format!("M{from:.1} {up:.1}V{down:.1}M{to:.1} {up:.1}V{down:.1}");
            path(page, "whisker", &format!("M{from:.1} {middle:.1}H{to:.1}{ends}"));
        }
        text(page, "value", WIDTH, base, value);
    }
    if let Some(reference) = reference {
        path(page, "reference", &format!("M{:.1} 0V{height:.1}", x(reference)));
    }
    page.push_str("</svg>\n</figure>\n");
}

pub(super) const STYLE: &str = include_str!("style.css");
const KEY: &str = include_str!("key.html");
const METHOD: &str = include_str!("method.html");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn a_name_from_a_job_file_never_becomes_markup() {
        let mut comparison = sample::comparison();
        let evil = "<script>alert('x')</script>&\"";
        comparison.jobs[0].name = evil.to_owned();
        comparison.jobs[0].rw = evil.to_owned();
        comparison.jobs[0].results[0].policy = evil.to_owned();
        comparison.jobs[0].results[0].warnings = vec![evil.to_owned()];
        comparison.warnings = vec![evil.to_owned()];
        comparison.disk = evil.to_owned();
        comparison.notify = evil.to_owned();
        comparison.host.cpu = evil.to_owned();
        let page = render(&comparison);
        assert!(!page.contains("<script") && !page.contains("'x'"));
        assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;"));
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = render(&sample::comparison());
        for word in ["http", "src=", "href", "url(", "@import", "<script", "<link"] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(page.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn each_job_has_its_charts_tables_and_whiskers() {
        let page = render(&sample::comparison());
        // Four charts of bars and the curve, with its figures; all figures, and what they mean.
        assert_eq!(page.matches("<svg").count(), 2 * 5);
        assert_eq!(page.matches("<table").count(), 2);
        assert_eq!(page.matches("<pre").count(), 2 + 1);
        // Eleven rows, two charts with intervals; of the curve all but the host; two jobs.
        assert_eq!(page.matches("class=\"whisker\"").count(), 2 * (22 + 10));
        assert!(page.contains("disk paced") && page.contains("notify adaptive"));
    }

    #[test]
    fn every_tag_is_closed() {
        let page = render(&sample::comparison());
        let body = page.split_once("<main>").unwrap().1.split_once("</main>").unwrap().0;
        assert_eq!(well_formed(body), Ok(()));
        // The check can fail.
        for wrong in ["<p>", "<p></q>", "<b><i></b></i>", "<rect x=1/>", "a & b", "<a b=\"<\"/>"] {
            assert!(well_formed(wrong).is_err(), "{wrong}");
        }
    }

    /// As an XML parser would have it: tags closed in order, values quoted, nothing unescaped.
    fn well_formed(text: &str) -> Result<(), String> {
        let mut open = Vec::new();
        let mut parts = text.split('<');
        check_text(parts.next().unwrap_or_default())?;
        for part in parts {
            let (tag, text) = part.split_once('>').ok_or(part)?;
            check_text(text)?;
            if let Some(name) = tag.strip_prefix('/') {
                (open.pop() == Some(name)).then_some(()).ok_or(part)?;
                continue;
            }
            let (name, rest) = tag.split_once(' ').unwrap_or((tag, ""));
            if !tag.ends_with('/') {
                open.push(name);
            }
            let mut rest = rest.trim_end_matches('/').trim();
            while !rest.is_empty() {
                let (_, value) = rest.split_once("=\"").ok_or(part)?;
                let (value, more) = value.split_once('"').ok_or(part)?;
                check_text(value)?;
                rest = more.trim();
            }
        }
        if open.is_empty() { Ok(()) } else { Err(format!("{open:?} are open")) }
    }

    fn check_text(text: &str) -> Result<(), String> {
        let entity = |rest: &str| {
            let name = rest.split_once(';').map(|(name, _)| name);
            ["amp", "lt", "gt", "quot", "#39"].map(Some).contains(&name)
        };
        let sound = text.split('&').skip(1).all(entity) && !text.contains(['<', '>']);
        if sound { Ok(()) } else { Err(text.to_owned()) }
    }

    #[test]
    fn the_figures_of_a_job_are_those_of_the_terminal() {
        let mut comparison = sample::comparison();
        let row = &mut comparison.jobs[0].results[4];
        row.effective_policy = "strict".to_owned();
        row.fallback = Some("no <deferring>".to_owned());
        row.explain = Some("up to <16> KiB\ncopied".to_owned());
        let page = render(&comparison);
        assert!(page.contains("lazy-sq* ran as strict: no &lt;deferring&gt;"));
        for job in &comparison.jobs {
            for line in table::job(job).lines().chain(table::explain(job).lines()) {
                assert!(page.contains(&escape(line)), "{line}");
            }
        }
    }

    #[test]
    fn figures_that_are_missing_huge_or_no_numbers_stay_within_the_chart() {
        let mut comparison = sample::comparison();
        let rows = &mut comparison.jobs[0].results;
        rows[0].ratio_to_off = None;
        rows[1].syncs_per_io = Some(f64::NAN);
        for (row, median) in rows[2..].iter_mut().zip([0.0, -1.0, 1e300, f64::INFINITY]) {
            let wild = Estimate { median, lo: Some(-1e9), hi: Some(1e305) };
            row.ratio_to_off.as_mut().unwrap().latency = wild;
        }
        comparison.jobs[1].results.clear();
        let page = render(&comparison);
        assert!(!page.contains("NaN") && !page.contains("inf"));
        let body = page.split_once("<main>").unwrap().1.split_once("</main>").unwrap().0;
        assert_eq!(well_formed(body), Ok(()));
        for width in page.split("width=\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            if let Ok(width) = width.parse::<f64>() {
                assert!((0.0..=500.0).contains(&width), "{width}");
            }
        }
    }
}
