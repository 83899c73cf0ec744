//! The address of a device on the guest's PCI bus.

use std::{fmt, str::FromStr};

/// A device and its function on bus 0, written as in QEMU: `06.0`, in hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Address {
    pub(super) device: u8,
    pub(super) function: u8,
}

impl Address {
    /// The last free device of a q35 machine: the next one is the chip set's.
    pub(super) const LAST: u8 = 0x1e;

    /// The function 0 of a device.
    pub(super) fn of(device: u8) -> Address {
        Address { device, function: 0 }
    }

    /// Bus, device and function in one number, which is the endpoint's ID too.
    pub(super) fn number(self) -> u16 {
        u16::from(self.device) << 3 | u16::from(self.function)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}.{:x}", self.device, self.function)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let (device, function) = text.split_once('.').unwrap_or((text, "0"));
        let number = |text: &str, last: u8| {
            let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
            u8::from_str_radix(text, 16).ok().filter(|&n| digits && n <= last)
        };
        match (number(device, Address::LAST), number(function, 7)) {
            (Some(device @ 1..), Some(function)) => Ok(Address { device, function }),
            _ => Err(format!(
                "{text:?} is not a PCI device and function: give 01.0 to {:02x}.7, hexadecimal",
                Address::LAST
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let parse = |text: &str| text.parse::<Address>();
        assert_eq!(parse("6"), Ok(Address::of(6)));
        assert_eq!(parse("1a.7").map(|address| address.number()), Ok(0xd7));
        assert_eq!(parse("06.1").unwrap().to_string(), "06.1");
        for wrong in ["", "0", "1f", "6.8", "+6", "6.", "6.0.0", "g"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
