//! The rows for a terminal.
use super::Row;

/// The rows as tables.
pub fn render(rows: &[Row]) -> String {
    format!("{} rows\n", rows.len())
}
