//! The contract `ringfence.compare/1`, as text.
use super::Comparison;

/// The whole comparison, one object, pretty-printed, with a newline at the end.
pub fn render(comparison: &Comparison) -> String {
    let mut text = serde_json::to_string_pretty(comparison).unwrap_or_else(|error| {
        // Only maps with keys that are not text can fail, and there is none.
        unreachable!("a comparison is plain data: {error}")
    });
    text.push('\n');
    text
}
