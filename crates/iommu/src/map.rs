//! Mappings to be made.

use crate::{Address, Error, GuestPhys, Prot, Range, Result, table::Mapping};

/// A mapping to be made: a range, where its first address leads, and what is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map<T> {
    range: Range,
    target: T,
    prot: Prot,
}

impl Map<GuestPhys> {
    /// Maps `range` to the guest-physical addresses from `target` on. Safe, because a guest may do
    /// anything to its own memory.
    #[inline]
    pub const fn new(range: Range, target: GuestPhys, prot: Prot) -> Map<GuestPhys> {
        Map { range, target, prot }
    }
}

impl<T: Address> Map<T> {
    /// Maps `range` to `target` and the addresses after it, of any kind.
    ///
    /// # Safety
    /// If the target is memory of this process, it must stay mapped, and not be used for anything
    /// else, until a sync of the mapping's unmap is over ([`Synced`](crate::Synced)), or for ever
    /// if none succeeds.
    #[inline]
    pub const unsafe fn of(range: Range, target: T, prot: Prot) -> Map<T> {
        Map { range, target, prot }
    }

    /// What is mapped.
    #[inline]
    pub const fn range(&self) -> Range {
        self.range
    }

    /// The target of its first address.
    #[inline]
    pub const fn target(&self) -> T {
        self.target
    }

    /// The permitted accesses.
    #[inline]
    pub const fn prot(&self) -> Prot {
        self.prot
    }

    /// The same, in the form that a table returns.
    #[inline]
    pub fn mapping(&self) -> Mapping {
        Mapping { range: self.range, target: self.target.as_u64(), prot: self.prot }
    }
}

/// A list that was carried out in part: the first `done` elements have taken effect, the next was
/// refused, and the refused element and those after it have changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("after {done} of a list: {error}")]
pub struct Partial {
    /// How many elements have taken effect.
    pub done: usize,
    /// Why the next has not.
    #[source]
    pub error: Error,
}

impl Partial {
    /// Calls `what` for each element of a list, until one fails.
    ///
    /// # Errors
    /// That failure, and the number of elements before it.
    pub fn each<T>(list: &[T], mut what: impl FnMut(&T) -> Result<()>) -> Result<(), Partial> {
        let mut each = list.iter().enumerate();
        each.try_for_each(|(done, item)| what(item).map_err(|error| Partial { done, error }))
    }
}
