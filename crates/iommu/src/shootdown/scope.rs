//! Where a reader translates.

use alloc::boxed::Box;

use ringfence_sync::{
    CachePadded,
    atomic::{AtomicU64, Ordering, fence},
    qsbr::Grace,
};

/// Where a reader translates: in one domain, anywhere, or nowhere. See the
/// [module](crate::shootdown).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scope(u16);

/// A token has a scope in so many low bits, and a grace period above them: with ten million
/// invalidations a second they suffice for fourteen years.
const BITS: u32 = 12;

impl Scope {
    /// Of a reader: it may translate anywhere, every invalidation waits for it. Of an invalidation:
    /// it waits for every reader.
    pub const ALL: Scope = Scope(0);
    /// Of a reader that looks nothing up in any domain.
    pub const NONE: Scope = Scope((1 << BITS) - 1);

    /// Whether a translation that was found in this scope may be one that is removed in the other.
    pub(super) fn meets(self, other: Scope) -> bool {
        self == other || self == Scope::ALL || other == Scope::ALL
    }

    /// What names an invalidation.
    pub(super) fn token(self, grace: Grace) -> u64 {
        grace.as_u64() << BITS | u64::from(self.0)
    }

    /// What a token names.
    pub(super) fn of_token(token: u64) -> (Grace, Scope) {
        (Grace::from_u64(token >> BITS), Scope((token & u64::from(Scope::NONE.0)) as u16))
    }
}

/// Where the readers are.
pub(super) struct Scopes {
    /// By the reader's index.
    of: Box<[CachePadded<AtomicU64>]>,
    /// How many were given.
    given: AtomicU64,
}

impl Scopes {
    pub(super) fn new(readers: usize) -> Scopes {
        let all = |_| CachePadded::new(AtomicU64::new(Scope::ALL.0.into()));
        Scopes { of: (0..readers).map(all).collect(), given: AtomicU64::new(0) }
    }

    pub(super) fn next(&self) -> Scope {
        let given = self.given.fetch_add(1, Ordering::Relaxed);
        Scope(1 + (given % u64::from(Scope::NONE.0 - 1)) as u16)
    }

    /// The reader of this index is there, before it looks anything up there.
    pub(super) fn enter(&self, index: usize, scope: Scope) {
        let of = &self.of[index];
        let scope = scope.0.into();
        // Only who has the index writes here.
        if of.load(Ordering::Relaxed) == scope {
            return;
        }
        // Release: what it did elsewhere comes before, for a scan that finds it here.
        of.store(scope, Ordering::Release);
        // Pairs with the fence in `Qsbr::start`, as that of a reader that comes online does: a scan
        // that finds the reader elsewhere began before this fence, and so its removal is seen by what
        // the reader looks up after it.
        fence(Ordering::SeqCst);
    }

    /// Whether the reader of this index may have what was removed in `scope`.
    #[inline]
    pub(super) fn may_be_in(&self, index: usize, scope: Scope) -> bool {
        // Acquire pairs with the Release in `enter`.
        Scope(self.of[index].load(Ordering::Acquire) as u16).meets(scope)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn tokens_tell_what_they_were_made_of_and_come_in_order() {
        let scopes = Scopes::new(0);
        let mut last = 0;
        for epoch in 1..=3 * u64::from(Scope::NONE.0) {
            let scope = scopes.next();
            assert!(scope != Scope::ALL && scope != Scope::NONE);
            let token = scope.token(Grace::from_u64(epoch));
            assert_eq!(Scope::of_token(token), (Grace::from_u64(epoch), scope));
            assert!(token > last);
            last = token;
        }
        assert_eq!(Scope::of_token(0), (Grace::from_u64(0), Scope::ALL));
    }
}
