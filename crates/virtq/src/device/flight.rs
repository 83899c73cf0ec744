//! The chains that a device has taken and not given back.

use crate::ChainFault;

/// The chains in flight, by name: a head of a split ring, a buffer id of a packed one.
#[derive(Debug)]
pub(super) struct Flight {
    /// 0 for a free name; else how many descriptors of the ring the chain takes, at least one, and
    /// above them its sequence number, or [`UNORDERED`].
    names: Box<[u64]>,
    /// How many chains were taken.
    order: u64,
    /// How many are in flight.
    pub(super) chains: u16,
}

const COUNT: u64 = 0xffff;
const ORDER: u64 = u64::MAX >> 16;
/// The sequence number of a chain that was not taken from the ring, and cannot go back there.
const UNORDERED: u64 = ORDER;

impl Flight {
    pub(super) fn new(size: u16) -> Flight {
        Flight { names: vec![0; size.into()].into_boxed_slice(), order: 0, chains: 0 }
    }

    /// Whether any chain was ever taken from the ring.
    pub(super) fn began(&self) -> bool {
        self.order > 0
    }

    /// Whether a chain of this name may be taken.
    #[inline]
    pub(super) fn check(&self, name: u16) -> Result<(), ChainFault> {
        match self.names.get(usize::from(name)) {
            None => Err(ChainFault::Head { size: self.names.len() as u16 }),
            Some(0) => Ok(()),
            Some(_) => Err(ChainFault::InFlight),
        }
    }

    /// Takes a chain of `count` descriptors with a [checked](Self::check) name.
    #[inline]
    pub(super) fn take(&mut self, name: u16, count: u16) {
        self.put(name, self.order & ORDER, count);
        self.order += 1;
    }

    /// Takes a chain that was in flight before the queue was made; its name was checked.
    pub(super) fn resume(&mut self, name: u16, count: u16) {
        self.put(name, UNORDERED, count);
    }

    #[inline]
    fn put(&mut self, name: u16, order: u64, count: u16) {
        self.names[usize::from(name)] = order << 16 | u64::from(count);
        // Each has a name of its own: at most the size.
        self.chains += 1;
    }

    /// Gives a chain back; returns how many descriptors it takes.
    ///
    /// # Panics
    /// It is not in flight.
    #[inline]
    pub(super) fn give_back(&mut self, name: u16) -> u16 {
        let count = core::mem::take(&mut self.names[usize::from(name)]) & COUNT;
        assert!(count != 0, "chain {name} is given back but not in flight");
        self.chains -= 1;
        count as u16
    }

    /// Undoes the last [`take`](Self::take), if it was of this name; returns how many descriptors
    /// the chain takes.
    pub(super) fn untake(&mut self, name: u16) -> Option<u16> {
        let entry = self.names.get_mut(usize::from(name)).filter(|entry| **entry != 0)?;
        let newest = self.order.checked_sub(1)? & ORDER;
        if newest == UNORDERED || *entry >> 16 != newest {
            return None;
        }
        let count = core::mem::take(entry) & COUNT;
        self.order -= 1;
        self.chains -= 1;
        Some(count as u16)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_the_newest_that_is_in_flight_goes_back() {
        let mut flight = Flight::new(4);
        flight.resume(3, 1);
        assert_eq!(flight.untake(3), None, "it was not taken from the ring");
        flight.take(0, 1);
        flight.take(1, 3);
        assert_eq!((flight.untake(0), flight.untake(2), flight.untake(9)), (None, None, None));
        assert_eq!(flight.untake(1), Some(3));
        assert_eq!(flight.untake(1), None);
        flight.take(1, 2);
        assert_eq!(flight.give_back(1), 2);
        assert_eq!(flight.untake(0), None, "one that was taken after it is back already");
        assert_eq!((flight.chains, flight.check(0)), (2, Err(ChainFault::InFlight)));
        assert_eq!(flight.check(4), Err(ChainFault::Head { size: 4 }));
    }
}
