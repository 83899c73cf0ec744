//! Values on the command line: names, numbers with units, and lists of them, separated by commas.

use std::{
    fmt::{self, Display},
    ops::RangeInclusive,
    str::FromStr,
    time::Duration,
};

/// A list given as one option, such as `rbtree,ringfence` (clap takes a bare `Vec` for a repeated
/// option). It is not empty and names nothing twice.
#[derive(Clone, Debug, PartialEq)]
pub struct List<T>(pub Vec<T>);

impl<T> std::ops::Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Clone> From<&[T]> for List<T> {
    fn from(items: &[T]) -> List<T> {
        List(items.to_vec())
    }
}

impl<T: FromStr<Err: Display> + PartialEq> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<List<T>, String> {
        let mut items = Vec::new();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let item: T = word.parse().map_err(|error: T::Err| error.to_string())?;
            if items.contains(&item) {
                return Err(format!("{word} is given twice in the list"));
            }
            items.push(item);
        }
        if items.is_empty() { Err("an empty list".to_owned()) } else { Ok(List(items)) }
    }
}

impl<T: Display> Display for List<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let items: Vec<String> = self.0.iter().map(T::to_string).collect();
        f.write_str(&items.join(","))
    }
}

/// A time in milliseconds.
///
/// # Errors
/// It is no number, or not from 0.1 to a minute.
pub fn milliseconds(text: &str) -> Result<Duration, String> {
    time(text, ("milliseconds", 1e3), "8 or 0.5", 0.1..=60_000.0)
}

/// A time in seconds.
///
/// # Errors
/// It is no number, or not from 0.01 to a day.
pub fn seconds(text: &str) -> Result<Duration, String> {
    time(text, ("seconds", 1.0), "1 or 0.2", 0.01..=86_400.0)
}

/// A time within a range, in units of which a second has `each`; `such` are examples.
fn time(
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

/// The letters of units, and how many of the one before it each is: `("km", 1000)`.
pub type Units = (&'static str, u64);

/// No units.
pub const PLAIN: Units = ("", 1);

/// A number in `range` that may have a unit after it: `1k`.
///
/// # Errors
/// It is no such number; the error names `what` it should be.
pub fn number(
    text: &str,
    what: &str,
    units: Units,
    range: RangeInclusive<u64>,
) -> Result<u64, String> {
    number_if(text, what, units, range, |_| true)
}

/// The same, of those that `fit`.
pub(crate) fn number_if(
    text: &str,
    what: &str,
    (units, times): Units,
    range: RangeInclusive<u64>,
    fit: impl Fn(u64) -> bool,
) -> Result<u64, String> {
    let unit = text.chars().last().map(|last| last.to_ascii_lowercase());
    let (digits, factor) = match unit.and_then(|unit| units.find(unit)) {
        Some(power) => (&text[..text.len() - 1], times.pow(power as u32 + 1)),
        None => (text, 1),
    };
    // No sign: the standard library's parser would take a `+`.
    let digits = Some(digits).filter(|digits| !digits.starts_with('+'));
    let number = digits.and_then(|digits| digits.parse::<u64>().ok()?.checked_mul(factor));
    number.filter(|number| range.contains(number) && fit(*number)).ok_or_else(|| {
        let [least, most] = [range.start(), range.end()].map(|n| short(*n, (units, times)));
        format!("{text:?} is not a {what} from {least} to {most}")
    })
}

/// A number with the largest unit that it is a multiple of.
pub fn short(n: u64, (units, times): Units) -> String {
    let mut powers = units.char_indices().rev().map(|(at, unit)| (times.pow(at as u32 + 1), unit));
    match powers.find(|(power, _)| n > 0 && n.is_multiple_of(*power)) {
        Some((power, unit)) => format!("{}{unit}", n / power),
        None => n.to_string(),
    }
}

/// Options of which none is given.
///
/// # Panics
/// One of them has no default.
pub fn defaults<T: clap::Args>() -> T {
    let command = T::augment_args(clap::Command::new("").no_binary_name(true));
    let found = command.try_get_matches_from::<_, &str>([]);
    found.and_then(|found| T::from_arg_matches(&found)).expect("each option has a default")
}

pub(crate) use ringfence_sync::named;

/// A number of a range, on the command line by itself: what errors call it, its units, the range and, if not
/// all of it will do, which do.
macro_rules! counted {
    ($(#[$doc:meta])* $name:ident($of:ty), $what:literal, $units:expr, $range:expr) => {
        $crate::list::counted! { $(#[$doc])* $name($of), $what, $units, $range, |_| true }
    };
    ($(#[$doc:meta])* $name:ident($of:ty), $what:literal, $units:expr, $range:expr, $fit:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub $of);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(&$crate::list::short(self.0 as u64, $units))
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<$name, String> {
                let number = $crate::list::number_if(text, $what, $units, $range, $fit)?;
                Ok($name(number as $of))
            }
        }
    };
}
pub(crate) use counted;
