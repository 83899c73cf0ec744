//! The holders of slots: the leak detector.

use core::cmp::Reverse;
use std::collections::HashMap;

use ringfence_iommu::Address;

use super::{BouncePools, Holder, mark::SlotOwner};

impl<T: Address> BouncePools<T> {
    /// The places in the program that hold slots, those with the most bytes first.
    pub fn holders(&self) -> Vec<Holder> {
        let mut holders: HashMap<_, Holder> = HashMap::new();
        let mut note = |held: SlotOwner, size: u64| {
            let at = held.at;
            let place = (at.file(), at.line(), at.column());
            let none = Holder { at, slots: 0, bytes: 0, oldest: Default::default() };
            let holder = holders.entry(place).or_insert(none);
            holder.slots += 1;
            holder.bytes += size;
            holder.oldest = holder.oldest.max(self.0.age(held.tick));
        };
        for zone in self.0.zones() {
            zone.marks.held().for_each(|held| note(held, zone.slot_bytes()));
        }
        for single in self.0.singles.held() {
            note(single.held, single.range.extent() + 1);
        }
        let mut holders: Vec<Holder> = holders.into_values().collect();
        holders.sort_by_key(|holder| Reverse((holder.bytes, holder.oldest)));
        holders
    }
}
