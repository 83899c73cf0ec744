//! Text that becomes a page.

use std::fmt::{Display, Write};

/// Adds to the page.
pub(super) fn put(page: &mut String, what: impl Display) {
    // Writing to a String does not fail.
    let _ = write!(page, "{what}");
}

/// Names come from job files, disks from the command line: neither may become markup.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

/// Policies of one promise have one colour.
pub(super) fn family(policy: &str) -> &'static str {
    match policy {
        "host" | "off" => "none",
        "persistent" | "zero-copy" => "persistent",
        "bounce" | "auto" => "strict",
        policy if policy.starts_with("strict") => "strict",
        policy if policy.starts_with("lazy") => "lazy",
        _ => "other",
    }
}
