//! The report as one self-contained file.
use super::Comparison;

/// The whole page.
pub fn render(comparison: &Comparison) -> String {
    let _ = comparison;
    todo!()
}
