//! Commands for contributors.
fn main() {}
