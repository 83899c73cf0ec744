//! Text that becomes a page.

use crate::text::plain;

/// Adds to a page.
macro_rules! put {
    ($page:expr, $($text:tt)+) => {{
        use std::fmt::Write;
        // Writing to a String does not fail.
        _ = write!($page, $($text)+);
    }};
}
pub(super) use put;

/// Begins a table in a box of this class; `heads` are separated by bars.
pub(super) fn begin_table(page: &mut String, class: &str, heads: &str) {
    let heads = heads.replace('|', "</th><th>");
    put!(
        page,
        "<div class=\"{class}\"><table>\n<thead><tr><th>{heads}</th></tr></thead>\n<tbody>\n"
    );
}

/// A row: the colour of its policy, its name, its cells.
pub(super) fn line(
    page: &mut String,
    policy: &str,
    name: &str,
    cells: impl IntoIterator<Item = String>,
) {
    put!(page, "<tr><th><i class=\"{}\"></i>{}</th>", family(policy), escape(name));
    cells.into_iter().for_each(|cell| put!(page, "<td>{}</td>", escape(&cell)));
    page.push_str("</tr>\n");
}

pub(super) fn end_table(page: &mut String) {
    page.push_str("</tbody>\n</table></div>\n");
}

/// A line of text in a chart.
pub(super) fn text(page: &mut String, class: &str, x: f64, y: f64, text: &str) {
    let text = escape(text);
    put!(page, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{text}</text>\n");
}

/// A line in a chart.
pub(super) fn path(page: &mut String, class: &str, d: &str) {
    put!(page, "<path class=\"{class}\" d=\"{d}\"/>\n");
}

/// Names come from job files, disks from the command line: neither may become markup.
pub(super) fn escape(text: &str) -> String {
    let entities = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&quot;"), ('\'', "&#39;")];
    entities.into_iter().fold(plain(text), |text, (c, entity)| text.replace(c, entity))
}

/// Policies of one promise have one colour.
pub(super) fn family(policy: &str) -> &'static str {
    match policy {
        "host" | "off" => "none",
        "persistent" | "zero-copy" => "persistent",
        "bounce" | "auto" | "proxy" => "strict",
        policy if policy.starts_with("strict") => "strict",
        policy if policy.starts_with("lazy") => "lazy",
        _ => "other",
    }
}
