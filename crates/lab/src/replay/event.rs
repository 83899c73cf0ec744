//! What a line of a recording can hold, and the words that its formats share.

/// What a line holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    /// Something was mapped, unmapped, attached or taken away.
    Event(Event),
    /// A line of this format that is not about mappings.
    Other,
}

/// A parsed line: what it holds; `None` if it is not a line of that format; or, if it is one about
/// a mapping, what is wrong with it.
pub(super) type ParseResult = Result<Option<Parsed>, String>;

/// Something that was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// Nanoseconds since some moment; `None` if the recording has no times.
    pub(super) time_ns: Option<u64>,
    /// The CPU that it happened on, if the recording has it.
    pub(super) cpu: u16,
    /// The domain by the recording's number; 0 if it has none.
    pub(super) domain: u32,
    pub(super) what: What,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The addresses from `first` to `last` were mapped to `target` and what follows it.
    Map { first: u64, last: u64, target: u64 },
    /// What is mapped from `first` to `last` was unmapped.
    Unmap { first: u64, last: u64 },
    /// A device was attached to the domain.
    Attach,
    /// A device was detached.
    Detach,
    /// The domain is gone, with all its mappings.
    Gone,
}

/// CPUs from this number on are taken for damage.
pub(super) const MOST_CPUS: u16 = 4096;

/// The value of `key=` among the words of `text`.
pub(super) fn field<'a>(text: &'a str, key: &str) -> Result<&'a str, String> {
    text.split_ascii_whitespace()
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        .ok_or_else(|| format!("{key}= is missing"))
}

/// A number with or without 0x before it; what is without is decimal.
pub(super) fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        // `from_str_radix` takes a sign, which no recording has.
        Some(hex) if !hex.starts_with('+') => u64::from_str_radix(hex, 16).ok(),
        None if !text.starts_with('+') => text.parse().ok(),
        _ => None,
    };
    parsed.ok_or_else(|| format!("{text:?} is not a 64-bit number"))
}

/// `SECONDS.FRACTION`, in nanoseconds. `None` if it is not such a time.
pub(super) fn seconds(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let fraction = fraction.parse::<u64>().ok()? * 10u64.pow(9 - fraction.len() as u32);
    whole.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(fraction)
}

/// A map, checked: a mapping must not pass the end of the addresses.
pub(super) fn map(first: u64, last: u64, target: u64) -> Result<What, String> {
    check(first, last)?;
    match target.checked_add(last - first) {
        Some(_) => Ok(What::Map { first, last, target }),
        None => Err(format!("the memory from {target:#x} on passes 2^64")),
    }
}

/// An unmap, checked.
pub(super) fn unmap(first: u64, last: u64) -> Result<What, String> {
    check(first, last).map(|()| What::Unmap { first, last })
}

fn check(first: u64, last: u64) -> Result<(), String> {
    (first <= last)
        .then_some(())
        .ok_or_else(|| format!("the range from {first:#x} to {last:#x} ends before it starts"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_with_up_to_nine_digits() {
        assert_eq!(seconds("1.5"), Some(1_500_000_000));
        assert_eq!(seconds("1795242881.258708"), Some(1_795_242_881_258_708_000));
        assert_eq!(seconds("0.000000001"), Some(1));
        for wrong in ["", "1", ".5", "1.", "1.0000000001", "-1.0", "99999999999999999999.0", "a.b"]
        {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn numbers_have_no_sign_and_64_bits() {
        assert_eq!(number("0xffffffffffffffff"), Ok(u64::MAX));
        assert_eq!(number("4096"), Ok(4096));
        for wrong in ["", "0x", "-1", "+1", "0x+1", "0x10000000000000000", "fff"] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_field_is_a_whole_word() {
        assert_eq!(field("virt_start=0x1 start=0x2", "start"), Ok("0x2"));
        assert!(field("virt_start=0x1", "start").unwrap_err().contains("start="));
    }
}
