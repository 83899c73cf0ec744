//! Values: sizes, times, numbers, flags. Each error says what is allowed.

use std::time::Duration;

/// What a number was written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) bytes: u64,
    /// Whether it had a suffix that fio reads as a power of 1000 (`ki`, `mib`, ...).
    pub(super) decimal: bool,
}

/// A size as fio reads it with its default `kb_base=1024`: `k`, `kb`, `K` are 1024 and, contrary
/// to the standards, `ki` and `kib` are 1000. Old job files depend on it.
pub(super) fn size(text: &str) -> Result<Size, String> {
    let allowed = "a number of bytes, with a suffix k, m, g, t or p (powers of 1024) if wanted";
    if text.ends_with('%') {
        return Err(format!(
            "{text} is a part of a file, and no file is opened here; give {allowed}"
        ));
    }
    let bad = || format!("{} is not a size; allowed: {allowed}", quote(text));
    let (number, suffix) = number_and_suffix(text).ok_or_else(bad)?;
    let lower = suffix.to_ascii_lowercase();
    let mut letters = lower.chars();
    let power = letters.next().map_or(Some(0), |letter| "bkmgtp".find(letter)).ok_or_else(bad)?;
    let decimal = match letters.as_str() {
        "" => false,
        "b" if power > 0 => false,
        "i" | "ib" if power > 0 => true,
        _ => return Err(bad()),
    };
    let factor = if decimal { 1000u64 } else { 1024 }.pow(power as u32);
    let bytes = number
        .checked_mul(factor)
        .ok_or_else(|| format!("{} is more than 2^64 bytes; allowed: {allowed}", quote(text)))?;
    Ok(Size { bytes, decimal })
}

/// A time; without a suffix seconds, as in fio.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let bad = || {
        format!(
            "{} is not a time; allowed: a number of seconds, or one with us, ms, s, m, h or d",
            quote(text)
        )
    };
    let (number, suffix) = number_and_suffix(text).ok_or_else(bad)?;
    let micros: u64 = match suffix.to_ascii_lowercase().as_str() {
        "us" | "usec" => 1,
        "ms" | "msec" => 1000,
        "" | "s" | "sec" => 1_000_000,
        "m" | "min" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(bad()),
    };
    number.checked_mul(micros).map(Duration::from_micros).ok_or_else(bad)
}

/// A whole number within `range`, decimal or 0x, with fio's size suffixes.
pub(super) fn number(text: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    match size(text) {
        Ok(Size { bytes, .. }) if range.contains(&bytes) => Ok(bytes),
        _ => Err(format!(
            "{} is not allowed; allowed: a whole number from {} to {}",
            quote(text),
            range.start(),
            range.end()
        )),
    }
}

/// A flag: 0 or 1, and 1 if only its name is given.
pub(super) fn flag(text: Option<&str>) -> Result<bool, String> {
    match text {
        None | Some("1") => Ok(true),
        Some("0") => Ok(false),
        Some(text) => Err(format!("{} is not allowed; allowed: 0 or 1", quote(text))),
    }
}

/// `text` for a message: no longer than a line, and nothing in it that a terminal would obey.
pub(super) fn quote(text: &str) -> String {
    const SHOWN: usize = 60;
    let mut shown: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    format!("\"{shown}\"")
}

fn number_and_suffix(text: &str) -> Option<(u64, &str)> {
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        // No suffix here but what is no digit: 0x1b is 27, 0x1k is 1024.
        let end = hex.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(hex.len());
        return Some((u64::from_str_radix(&hex[..end], 16).ok()?, &hex[end..]));
    }
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_fio_reads_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512b", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4kb", 4096),
            ("4KB", 4096),
            ("1m", 1 << 20),
            ("1G", 1 << 30),
            ("2t", 2 << 40),
            ("1p", 1 << 50),
            ("4ki", 4000),
            ("1GiB", 1_000_000_000),
            ("0x1000", 4096),
            ("0x1k", 1024),
        ] {
            assert_eq!(size(text).map(|size| size.bytes), Ok(bytes), "{text}");
        }
        assert!(size("4ki").unwrap().decimal && !size("4kb").unwrap().decimal);
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in [
            "",
            "k",
            "4x",
            "-1",
            "1.5g",
            "4 k",
            "4kk",
            "4bb",
            "4bi",
            "0x",
            "16384p",
            "99999999999999999999",
        ] {
            assert!(size(text).unwrap_err().contains("allowed"), "{text}");
        }
        assert!(size("50%").unwrap_err().contains("no file is opened"));
    }

    #[test]
    fn times_are_seconds_unless_they_say_otherwise() {
        for (text, ms) in
            [("10", 10_000), ("10s", 10_000), ("500ms", 500), ("2m", 120_000), ("1H", 3_600_000)]
        {
            assert_eq!(time(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "10x", "1.5", "-3", "00:01:00", "99999999999999999999d"] {
            assert!(time(text).unwrap_err().contains("allowed"), "{text}");
        }
    }

    #[test]
    fn a_message_never_carries_what_a_terminal_obeys() {
        assert_eq!(quote("a\u{1b}[2J"), r#""a\u{1b}[2J""#);
        assert!(quote(&"x".repeat(9999)).len() < 80);
    }
}
