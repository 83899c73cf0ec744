//! The price of safety as one picture: an SVG file for light and dark pages.

use super::{
    Comparison, curve,
    html::STYLE,
    markup::{escape, put},
    plot::{HEIGHT, WIDTH},
    table::{headline, title},
};
use crate::text::wrap;

/// Above each chart: what the job is.
const TITLE: f64 = 30.0;

/// The curve of each job, one below the other, and where they were measured; without a chart if the
/// run has nothing to compare with.
pub fn render(comparison: &Comparison) -> String {
    let (mut charts, mut y) = (String::new(), 0.0);
    for job in &comparison.jobs {
        let mut chart = String::new();
        let place = format!(" x=\"0\" y=\"{}\" width=\"{WIDTH}\" height=\"{HEIGHT}\"", y + TITLE);
        if curve::chart(&mut chart, job, &place) {
            put!(charts, "<text x=\"8\" y=\"{}\">{}</text>\n", y + 20.0, escape(&title(job)));
            charts.push_str(&chart);
            y += TITLE + HEIGHT;
        }
    }
    // A line of the text is at most as wide as the picture.
    for line in wrap(&headline(comparison)).lines() {
        put!(charts, "<text class=\"none\" x=\"8\" y=\"{}\">{}</text>\n", y + 20.0, escape(line));
        y += 18.0;
    }
    let height = y + 12.0;
    let mut palettes = STYLE.split(":root {").skip(1);
    let (light, dark) = (palettes.next().unwrap_or(""), palettes.next().unwrap_or(""));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"system-ui, sans-serif\" font-size=\"13\">\n\
         <style>\n{}@media (prefers-color-scheme: dark) {{\n{}}}\n</style>\n\
         <rect class=\"back\" width=\"100%\" height=\"100%\"/>\n{charts}</svg>\n",
        rules(light),
        rules(dark),
    )
}

/// What the report's style says of elements of a chart, with the colours of `palette` in it: a
/// viewer of pictures need not know CSS's variables.
fn rules(palette: &str) -> String {
    const CHART: [&str; 8] =
        ["svg ", "circle", "rect", ".whisker", ".reference", ".grid", ".frontier", ".leader"];
    let block = palette.split('}').next().unwrap_or("");
    let colours = block.split(';').filter_map(|pair| pair.trim().split_once(": "));
    let lines = STYLE.lines().filter(|line| {
        CHART.iter().any(|element| line.starts_with(element)) && !line.starts_with("svg {")
    });
    let lines: String = lines.flat_map(|line| [line, "\n"]).collect();
    colours.fold(lines, |lines, (name, colour)| lines.replace(&format!("var({name})"), colour))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn each_job_has_a_chart_and_every_element_is_closed() {
        let mut comparison = sample::comparison();
        comparison.jobs[0].name = "<script>".to_owned();
        let picture = render(&comparison);
        assert_eq!(picture.matches("<svg").count(), 1 + comparison.jobs.len());
        for element in ["svg", "text", "style", "circle", "title"] {
            let opened = picture.matches(&format!("<{element} ")).count()
                + picture.matches(&format!("<{element}>")).count();
            assert_eq!(opened, picture.matches(&format!("</{element}>")).count(), "{element}");
        }
        assert!(picture.contains("&lt;script&gt;") && !picture.contains("<script>"));
        assert!(picture.contains("prefers-color-scheme: dark"));
        // Each colour stands twice, as itself.
        assert!(!picture.contains("var("), "{picture}");
        assert_eq!(picture.matches("circle.strict").count(), 2);
        assert!(picture.contains("fill: #2b6cb0") && picture.contains("fill: #4d94dd"));
    }

    #[test]
    fn without_a_baseline_there_is_no_chart() {
        let mut comparison = sample::comparison();
        let rows = comparison.jobs.iter_mut().flat_map(|job| &mut job.results);
        rows.for_each(|row| row.ratio_to_off = None);
        assert_eq!(render(&comparison).matches("<svg").count(), 1);
    }
}
