//! Options that are lists: a type of their own, since clap takes a bare `Vec` for a repeated option.

use std::str::FromStr;

use ringfence_lab::{allocators::AllocatorKind, list::parse};

/// A list that is one option.
#[derive(Clone)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

/// The items of a list.
pub(crate) fn list<T: FromStr<Err = String> + PartialEq>(text: &str) -> Result<List<T>, String> {
    parse(text, "list").map(List)
}

/// The allocators asked for.
pub(crate) fn allocators(text: &str) -> Result<List<AllocatorKind>, String> {
    AllocatorKind::parse_list(text).map(List)
}
