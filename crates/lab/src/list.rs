//! Lists of names on the command line, separated by commas.

use std::{fmt::Display, str::FromStr};

/// The items of a list such as `rbtree,ringfence`. `what` is how errors call it: "list of
/// allocators".
///
/// # Errors
/// One is none, or the list is empty or names one twice.
pub fn parse<T>(text: &str, what: &str) -> Result<Vec<T>, String>
where
    T: FromStr<Err: Display> + PartialEq,
{
    let mut items = Vec::new();
    for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let item: T = word.parse().map_err(|error: T::Err| error.to_string())?;
        if items.contains(&item) {
            return Err(format!("{word} stands twice in the {what}"));
        }
        items.push(item);
    }
    if items.is_empty() { Err(format!("an empty {what}")) } else { Ok(items) }
}
