//! Options that are lists (with a type of their own, since clap takes a bare `Vec` for a repeated
//! option); and times.

use std::{ops::RangeInclusive, str::FromStr, time::Duration};

use ringfence_lab::{allocators::AllocatorKind, list::parse};

/// A list given as one option.
#[derive(Clone)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

/// The items of a list.
pub(crate) fn list<T: FromStr<Err = String> + PartialEq>(text: &str) -> Result<List<T>, String> {
    parse(text, "list").map(List)
}

/// The allocators that were asked for.
pub(crate) fn allocators(text: &str) -> Result<List<AllocatorKind>, String> {
    parse(text, "list of allocators").map(List)
}

/// A time within a range, in units of which a second has `each`; `such` are examples.
pub(crate) fn time(
    text: &str,
    (units, each): (&str, f64),
    such: &str,
    range: RangeInclusive<f64>,
) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("a number of {units}, such as {such}"))?;
    match range.contains(&number) {
        true => Ok(Duration::from_secs_f64(number / each)),
        false => Err(format!("from {} to {} {units}", range.start(), range.end())),
    }
}
