//! The holders of slots: the leak detector.

use core::{cmp::Reverse, sync::atomic::Ordering};
use std::{collections::HashMap, sync::Weak};

use ringfence_iommu::{Address, Iova};

use super::{BouncePools, DeviceShare, Holder, SlotHolder, SlotInfo, mark::SlotOwner};

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
            holder.oldest = holder.oldest.max(self.0.age(held.stamp.tick()));
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

    /// What each device holds, those with the most bytes first.
    pub fn devices(&self) -> Vec<DeviceShare> {
        let accounts = self.0.accounts.lock();
        let mut shares: Vec<DeviceShare> = accounts
            .iter()
            .filter_map(Weak::upgrade)
            .map(|account| DeviceShare {
                device: account.number,
                held: account.held.load(Ordering::Relaxed),
                quota: account.quota,
            })
            .collect();
        shares.sort_by_key(|share| Reverse(share.held));
        shares
    }

    /// The slot at `iova` and its holder, to explain a fault there. `None` if there is no slot.
    pub fn find(&self, iova: Iova) -> Option<SlotInfo> {
        let info = |range, single_use, held: Option<SlotOwner>| {
            let holder = held.map(|SlotOwner { at, stamp }| SlotHolder {
                at,
                device: stamp.device(),
                age: self.0.age(stamp.tick()),
            });
            SlotInfo { range, single_use, holder }
        };
        if let Some(single) = self.0.singles.at(iova) {
            return Some(info(single.range, true, Some(single.held)));
        }
        let zones = self.0.zones();
        let zone = zones.iter().find(|zone| zone.range.contains(iova))?;
        let number = zone.number(iova);
        zone.chunk(number)?;
        Some(info(zone.range_of(&(number..number + 1)), false, zone.marks.get(number)))
    }
}
