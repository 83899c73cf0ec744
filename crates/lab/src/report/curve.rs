//! The price of safety as a curve: what each row exposes, against how fast it is.
//!
//! Exposure is on a log scale between two edges that are no numbers: on the left, rows that expose
//! nothing; on the right, rows that expose memory without bound. A row is at an edge for what it
//! promised and kept, never because a figure is missing or small.

use super::{
    Exposure, JobReport, Metric, PolicyResult, Reach,
    markup::{begin_table, end_table, escape, family, line, path, put, text},
    plot::{
        BOTTOM, Decades, EDGE, HEIGHT, LEFT, LETTER, LINE, RIGHT, Ratios, Rect, TOP, WIDTH,
        power_of_ten,
    },
};
use crate::{stats::Estimate, text::number};

/// Ratios beyond are drawn at the border: a round with a pause in it must not flatten all others.
const MOST: f64 = 4.0;

/// The figure of a job: the chart if there is something to compare with, and its numbers.
pub(super) fn figure(page: &mut String, job: &JobReport) {
    if job.results.iter().all(|row| row.exposure.is_none()) {
        return;
    }
    let measure = match job.metric {
        Metric::Bandwidth => "bandwidth",
        Metric::Iops => "I/Os a second",
    };
    put!(
        page,
        "<figure class=\"wide\">\n<figcaption>The price of safety<small>{measure} against off, \
             over what stays reachable after unmap: MiB × ms for each GiB mapped (1024: each byte \
             for a millisecond); the line is the best to be had for no more exposure</small>\
             </figcaption>\n"
    );
    chart(page, job, "");
    numbers(page, job);
    page.push_str("</figure>\n");
}

/// The places of the two edges on the axis of exposure, the left one and the right one.
const NOTHING: f64 = f64::NEG_INFINITY;
const UNBOUNDED: f64 = f64::INFINITY;

struct Point {
    label: String,
    family: &'static str,
    /// The exposure's decimal logarithm, or an edge; what is too little for a logarithm is at the axis's
    /// beginning, not at the edge.
    place: f64,
    ratio: f64,
    interval: Option<(f64, f64)>,
    about: String,
    /// Where it is drawn.
    x: f64,
    y: f64,
}

impl Point {
    /// `None` if either of its figures is missing.
    fn new(job: &JobReport, row: &PolicyResult) -> Option<Point> {
        let exposure = row.exposure?;
        let ratio = row.ratio(job.metric).filter(|ratio| ratio.median.is_finite())?;
        let place = match exposure.reach {
            Reach::None | Reach::Copies => NOTHING,
            Reach::Persistent | Reach::Always | Reach::Leaked => UNBOUNDED,
            Reach::Flush => {
                let figure = exposure.mib_ms_per_gib().filter(|figure| figure.is_finite())?;
                if figure > 0.0 { figure.log10().clamp(-6.0, 12.0) } else { -6.0 }
            }
        };
        let label = job.label(row);
        let about = format!("{label}: {}, {}", percent(ratio), exposed(&exposure));
        let leaked = if exposure.reach == Reach::Leaked { " LEAKED" } else { "" };
        Some(Point {
            label: label + leaked,
            family: family(&row.policy),
            place,
            ratio: ratio.median.clamp(0.0, MOST),
            interval: ratio.lo.zip(ratio.hi).filter(|(lo, hi)| lo.is_finite() && hi.is_finite()),
            about,
            x: 0.0,
            y: 0.0,
        })
    }
}

/// The chart of a job, an `svg` element with these `attributes`; whether there is something to draw.
pub(super) fn chart(page: &mut String, job: &JobReport, attributes: &str) -> bool {
    let mut points: Vec<Point> =
        job.results.iter().filter_map(|row| Point::new(job, row)).collect();
    if points.is_empty() {
        return false;
    }
    let logs = points.iter().map(|point| point.place).filter(|place| place.is_finite());
    let logs: Vec<f64> = logs.collect();
    let drawn: Vec<_> = points.iter().map(|point| (point.ratio, point.interval)).collect();
    let (decades, ratios) = (Decades::of(&logs), Ratios::of(&drawn));
    put!(
        page,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\"{attributes} role=\"img\" \
             aria-label=\"Throughput against exposure\">\n"
    );
    axes(page, &decades, &ratios);
    // Side by side within an edge, where the axis has no values.
    for (edge, from) in [(NOTHING, LEFT), (UNBOUNDED, RIGHT - EDGE)] {
        let of = points.iter().filter(|point| point.place == edge).count() as f64;
        let within = points.iter_mut().filter(|point| point.place == edge);
        within.zip(0..).for_each(|(point, n)| point.x = from + EDGE * (f64::from(n) + 0.5) / of);
    }
    for point in &mut points {
        if point.place.is_finite() {
            point.x = decades.x(point.place);
        }
        point.y = ratios.y(point.ratio);
    }
    points.sort_by(|a, b| a.x.total_cmp(&b.x));
    frontier(page, &points);
    for Point { x, y, family, interval, about, .. } in &points {
        if let Some((lo, hi)) = *interval {
            let (one, other) = (x - 4.0, x + 4.0);
            let mut d = format!("M{x:.1} {:.1}V{:.1}", ratios.y(lo), ratios.y(hi));
            // An end beyond the plot is not drawn.
            for end in [lo, hi].into_iter().filter(|end| ratios.holds(*end)) {
                put!(d, "M{one:.1} {:.1}H{other:.1}", ratios.y(end));
            }
            path(page, "whisker", &d);
        }
        let about = escape(about);
        put!(page, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" class=\"{family}\">");
        put!(page, "<title>{about}</title></circle>\n");
    }
    labels(page, &points);
    page.push_str("</svg>\n");
    true
}

fn axes(page: &mut String, decades: &Decades, ratios: &Ratios) {
    let (middle, high) = ((TOP + BOTTOM) / 2.0, BOTTOM - TOP);
    for (from, name, hint) in
        [(LEFT, "nothing", "strict"), (RIGHT - EDGE, "without bound", "off, persistent")]
    {
        let at = from + EDGE / 2.0;
        put!(
            page,
            "<rect x=\"{from:.1}\" y=\"{TOP}\" width=\"{EDGE}\" height=\"{high:.1}\" class=\"edge\"/>\n"
        );
        text(page, "tick", at, BOTTOM + 18.0, name);
        text(page, "hint", at, BOTTOM + 36.0, hint);
    }
    for ratio in ratios.ticks() {
        let y = ratios.y(ratio);
        let class = if (ratio - 1.0).abs() < 1e-9 { "reference" } else { "grid" };
        path(page, class, &format!("M{LEFT:.1} {y:.1}H{RIGHT:.1}"));
        text(page, "label", LEFT - 8.0, y + 4.5, &format!("{:.0} %", ratio * 100.0));
    }
    for decade in decades.ticks() {
        let x = decades.x(f64::from(decade));
        path(page, "grid", &format!("M{x:.1} {TOP:.1}V{BOTTOM:.1}"));
        text(page, "tick", x, BOTTOM + 18.0, &power_of_ten(decade));
    }
    text(page, "hint", (LEFT + RIGHT) / 2.0, BOTTOM + 36.0, "exposure, MiB × ms per GiB");
    put!(
        page,
        "<text x=\"12\" y=\"{middle:.1}\" class=\"hint\" transform=\"rotate(-90 12 {middle:.1})\">\
             against off</text>\n"
    );
}

/// The best ratio at each exposure or less: a line that only rises.
fn frontier(page: &mut String, points: &[Point]) {
    // Within an edge the order means nothing: its best is the beginning.
    let first = points.iter().filter(|point| point.place == NOTHING);
    let mut best = first.map(|point| point.y).fold(f64::MAX, f64::min);
    let mut d = String::new();
    if best < f64::MAX {
        put!(d, "M{LEFT:.1} {best:.1}");
    }
    for Point { x, y, place, .. } in points {
        // On the page less is higher.
        if *y < best {
            // Exposure without bound begins at its edge's border, whatever the point's slot.
            let x = if *place == UNBOUNDED { RIGHT - EDGE } else { *x };
            match d.is_empty() {
                true => put!(d, "M{x:.1} {y:.1}"),
                false => put!(d, "H{x:.1}V{y:.1}"),
            }
            best = *y;
        }
    }
    path(page, "frontier", &format!("{d}H{RIGHT:.1}"));
}

/// A name beside each point: where there is room, else farther off, with a line to its point.
fn labels(page: &mut String, points: &[Point]) {
    let around = |point: &Point| Rect::new(point.x - 7.0, point.y - 7.0, 14.0, 14.0);
    let mut taken: Vec<Rect> = points.iter().map(around).collect();
    let frame = Rect { left: LEFT, top: TOP - 10.0, right: RIGHT, bottom: BOTTOM };
    for Point { x, y, label, .. } in points {
        let wide = LETTER * label.chars().count() as f64;
        let beside = |dy: f64| {
            let at = |left: f64| Rect::new(left, y + dy - LINE / 2.0, wide, LINE);
            [at(x + 9.0), at(x - 9.0 - wide), at(x - wide / 2.0)]
        };
        // A little above or below, where the line does not run; then ever farther.
        let steps = (0..16).map(|n| 10.0 + LINE * f64::from(n)).flat_map(|dy| [-dy, dy]);
        let places: Vec<Rect> = steps.flat_map(beside).collect();
        let within = || places.iter().filter(|place| frame.holds(place));
        let free = within().find(|place| taken.iter().all(|other| !place.meets(other)));
        // Without any room the label overlaps: the table has the numbers.
        let Some(place) = free.or_else(|| within().next()).or(places.first()).copied() else {
            continue;
        };
        let middle = place.top + LINE / 2.0;
        if (middle - y).abs() > 1.2 * LINE {
            let to_x = x.clamp(place.left, place.right);
            path(page, "leader", &format!("M{x:.1} {y:.1}L{to_x:.1} {middle:.1}"));
        }
        text(page, "point", place.left, place.top + LINE - 4.0, label);
        taken.push(place);
    }
}

/// The numbers of the chart, for those who cannot see it or want them exactly.
fn numbers(page: &mut String, job: &JobReport) {
    begin_table(
        page,
        "inner",
        "policy|against off|unmapped memory is reachable|MiB × ms a GiB|a byte on average, ms|longest, ms|\
         longer than the bound",
    );
    let dash = || "–".to_owned();
    for (row, exposure) in job.results.iter().filter_map(|row| Some((row, row.exposure?))) {
        let per_gib = exposure.mib_ms_per_gib();
        let cells = [
            row.ratio(job.metric).map_or_else(dash, percent),
            until(exposure.reach).to_owned(),
            per_gib.map_or_else(dash, number),
            per_gib.map_or_else(dash, |figure| number(figure / 1024.0)),
            exposure.max_ms.map_or_else(dash, number),
            match exposure.late_releases {
                0 => dash(),
                n => n.to_string(),
            },
        ];
        line(page, &row.policy, &job.label(row), cells);
    }
    end_table(page);
}

/// What a reader must know of a reach, in a few words.
fn until(reach: Reach) -> &'static str {
    match reach {
        Reach::None => "never",
        Reach::Copies => "never, but copies",
        Reach::Flush => "until a flush",
        Reach::Persistent => "as long as the job runs, by choice",
        Reach::Always => "always",
        Reach::Leaked => "although it must not: LEAKED",
    }
}

fn exposed(exposure: &Exposure) -> String {
    match (exposure.reach, exposure.mib_ms_per_gib(), exposure.max_ms) {
        (Reach::Flush, Some(figure), Some(max)) => {
            format!("{} MiB × ms a GiB, {} ms at most", number(figure), number(max))
        }
        (reach, ..) => format!("reachable after unmap {}", until(reach)),
    }
}

pub(super) fn percent(ratio: Estimate) -> String {
    if !ratio.median.is_finite() {
        return "–".to_owned();
    }
    let half = ratio.half_width().filter(|half| half.is_finite());
    let half = half.map_or(String::new(), |half| format!(" ±{}", number(half * 100.0)));
    match ratio.median * 100.0 {
        percent if percent.abs() < 1e4 => format!("{percent:.1} %{half}"),
        percent => format!("{} %{half}", number(percent)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    fn drawn(job: &JobReport) -> String {
        let mut page = String::new();
        figure(&mut page, job);
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        page
    }

    fn job() -> JobReport {
        sample::comparison().jobs.remove(0)
    }

    /// The place of a row's point: where its circle stands, and where its label begins.
    fn point(page: &str, label: &str) -> (f64, f64) {
        let about = page
            .split("<circle cx=\"")
            .skip(1)
            .find(|rest| rest.split_once("<title>").unwrap().1.starts_with(&format!("{label}: ")));
        let about = about.unwrap_or_else(|| panic!("no point {label}"));
        let mut numbers = about.split('"').step_by(2).map(|text| text.parse::<f64>().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    }

    fn is_nothing(x: f64) -> bool {
        (LEFT..LEFT + EDGE).contains(&x)
    }

    fn is_unbounded(x: f64) -> bool {
        (RIGHT - EDGE..RIGHT).contains(&x)
    }

    #[test]
    fn strict_is_at_the_left_edge_and_lazy_in_the_order_of_its_exposure() {
        let page = drawn(&job());
        let x = |label| point(&page, label).0;
        assert!(is_nothing(x("strict")) && is_nothing(x("strict+map")));
        assert!(is_unbounded(x("off")));
        let [mq, sq] = [x("lazy-mq"), x("lazy-sq")];
        assert!(LEFT + EDGE < mq && mq < sq && sq < RIGHT - EDGE, "{mq} {sq}");
        // Without virtqueues there is nothing to protect.
        assert!(!page.contains("host: "));
        // Faster is higher.
        assert!(point(&page, "strict+map").1 < point(&page, "strict").1);
    }

    #[test]
    fn what_is_persistent_leaked_or_unknown_never_stands_with_strict() {
        for (reach, word) in
            [(Reach::Persistent, "by choice"), (Reach::Leaked, "LEAKED"), (Reach::Always, "always")]
        {
            let mut job = job();
            let found = job.results[3].exposure.as_mut().unwrap();
            // Whatever its other figures are.
            (found.reach, found.byte_ms_per_gib) = (reach, Some(0.0));
            let page = drawn(&job);
            assert!(is_unbounded(point(&page, "strict+map").0) && page.contains(word), "{word}");
        }
        // Lazy, and by chance nothing was exposed: on the axis, not at the edge.
        let mut job = job();
        job.results[5].exposure.as_mut().unwrap().byte_ms_per_gib = Some(0.0);
        let x = point(&drawn(&job), "lazy-mq").0;
        assert!(x > LEFT + EDGE && x < RIGHT - EDGE, "{x}");
        // No figure, no point; the table has a dash.
        job.results[5].exposure.as_mut().unwrap().byte_ms_per_gib = None;
        assert!(!drawn(&job).contains("<title>lazy-mq: "));
    }

    #[test]
    fn every_row_is_in_the_table_of_numbers() {
        let job = job();
        let page = drawn(&job);
        let table = page.split_once("<table>").unwrap().1;
        for row in &job.results[1..] {
            assert!(table.contains(&format!("</i>{}</th>", row.policy)), "{}", row.policy);
        }
        // Four ms a byte, 10.2 at most.
        assert!(table.contains("<td>4096</td><td>4.00</td><td>10.2</td>"), "{table}");
        assert!(table.contains("<td>never</td><td>0</td>") && table.contains("<td>always</td>"));
    }

    #[test]
    fn without_rows_off_or_figures_there_is_no_chart() {
        let mut job = job();
        job.results.iter_mut().for_each(|row| row.ratio_to_off = None);
        let page = drawn(&job);
        assert!(!page.contains("<svg") && page.contains("<table>"));
        job.results.iter_mut().for_each(|row| row.exposure = None);
        assert_eq!(drawn(&job), "");
        job.results.clear();
        assert_eq!(drawn(&job), "");
    }

    #[test]
    fn wild_figures_stay_within_the_plot() {
        let mut job = job();
        let wild = [f64::NAN, f64::INFINITY, 1e300, -1e300, 0.0, 1e-300];
        for (row, n) in job.results.iter_mut().zip(wild.iter().cycle()) {
            let ratios = row.ratio_to_off.as_mut().unwrap();
            ratios.bandwidth = Estimate { median: -*n, lo: Some(-n), hi: Some(*n) };
            ratios.iops = ratios.bandwidth;
            if let Some(found) = &mut row.exposure {
                found.byte_ms_per_gib = Some(*n);
                found.max_ms = Some(*n);
            }
        }
        let page = drawn(&job);
        let all = |name: &str| {
            let name = format!(" {name}=\"");
            let values = page.split(&name).skip(1);
            values
                .filter_map(|rest| rest.split('"').next()?.parse::<f64>().ok())
                .collect::<Vec<_>>()
        };
        let (xs, ys) = ([all("cx"), all("x")].concat(), [all("cy"), all("y")].concat());
        assert!(xs.len() > 8 && ys.len() > 8);
        assert!(xs.iter().all(|x| (0.0..=WIDTH).contains(x)), "{xs:?}");
        assert!(ys.iter().all(|y| (0.0..=HEIGHT).contains(y)), "{ys:?}");
    }

    #[test]
    fn labels_do_not_cover_each_other_and_names_are_escaped() {
        let mut job = job();
        // All alike: as crowded as it gets.
        let (ratios, exposure) = (job.results[5].ratio_to_off, job.results[5].exposure);
        for row in &mut job.results {
            (row.ratio_to_off, row.exposure) = (ratios, exposure);
        }
        job.results[2].policy = "<b>&\"".to_owned();
        let page = drawn(&job);
        assert!(!page.contains("<b>") && page.contains("&lt;b&gt;&amp;&quot;"));
        let labels: Vec<Rect> = page
            .split("<text ")
            .filter(|text| text.contains("class=\"point\""))
            .map(|text| {
                let mut values = text.split('"').skip(1).step_by(2);
                let mut number = || values.next().unwrap().parse::<f64>().unwrap();
                let (x, y) = (number(), number());
                let name = text.split_once('>').unwrap().1.split_once('<').unwrap().0;
                let name = name.replace("&lt;", "<").replace("&gt;", ">");
                let name = name.replace("&amp;", "&").replace("&quot;", "\"");
                // A little less, for what printing rounds off.
                let wide = LETTER * name.chars().count() as f64 - 0.2;
                Rect::new(x + 0.1, y - LINE + 4.1, wide, LINE - 0.2)
            })
            .collect();
        assert_eq!(labels.len(), job.results.len());
        for (n, label) in labels.iter().enumerate() {
            assert!(labels[..n].iter().all(|other| !label.meets(other)), "{n}");
        }
    }

    #[test]
    fn the_line_only_rises() {
        let page = drawn(&job());
        let path = page.split_once("class=\"frontier\" d=\"").unwrap().1.split_once('"').unwrap().0;
        let path = path.replace(['M', 'H', 'V'], " ");
        let numbers: Vec<f64> = path.split_whitespace().map(|n| n.parse().unwrap()).collect();
        // x y, then x and y in turn, and the end.
        let xs: Vec<f64> = numbers.iter().copied().step_by(2).collect();
        let ys: Vec<f64> = numbers.iter().copied().skip(1).step_by(2).collect();
        assert!(xs.is_sorted() && ys.iter().rev().is_sorted() && ys.len() > 2, "{xs:?} {ys:?}");
        assert_eq!((xs[0], *xs.last().unwrap()), (LEFT, RIGHT));
    }
}
