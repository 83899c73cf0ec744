//! Usage errors, and the values that several commands take.

/// A usage error, which is found before anything has run; the exit code is 2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// A usage error with this text.
pub(crate) fn wrong(text: impl Into<String>) -> anyhow::Error {
    Usage(text.into()).into()
}

/// Parses a number of bytes, which may have a unit.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let unit = text.char_indices().next_back().and_then(|(at, unit)| {
        let shift = 10 * (1 + "kmgt".find(unit.to_ascii_lowercase())?);
        Some((&text[..at], shift))
    });
    let (digits, shift) = unit.unwrap_or((text, 0));
    let number = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok());
    let bytes = number.flatten().and_then(|number: u64| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| format!("{text:?} is not a size: give a number and K, M, G or T"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_fit() {
        assert_eq!(size("64m"), Ok(64 << 20));
        assert_eq!(size("256M"), Ok(256 << 20));
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("1T"), Ok(1 << 40));
        let wrong =
            ["", "m", "M", "+1", "-1", "64mb", "17179869184G", "99999999999t", "\u{fc}", "1.5g"];
        for wrong in wrong {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
