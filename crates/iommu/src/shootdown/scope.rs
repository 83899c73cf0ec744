//! The scopes in which readers translate.

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

/// A token has a scope in this many low bits, and a grace period in the bits above: at ten million
/// invalidations per second those last fourteen years.
const BITS: u32 = 12;

impl Scope {
    /// For a reader: it may translate anywhere, and every invalidation waits for it. For an
    /// invalidation: it waits for every reader.
    pub const ALL: Scope = Scope(0);
    /// For a reader that makes no look-ups in any domain.
    pub const NONE: Scope = Scope((1 << BITS) - 1);

    /// Whether a translation found in this scope may be removed by an invalidation in the other.
    pub(super) fn meets(self, other: Scope) -> bool {
        self == other || self == Scope::ALL || other == Scope::ALL
    }

    /// The token of an invalidation.
    pub(super) fn token(self, grace: Grace) -> u64 {
        grace.as_u64() << BITS | u64::from(self.0)
    }

    /// The grace period and scope of a token.
    pub(super) fn of_token(token: u64) -> (Grace, Scope) {
        (Grace::from_u64(token >> BITS), Scope((token & u64::from(Scope::NONE.0)) as u16))
    }
}

/// The scopes of the readers.
pub(super) struct Scopes {
    /// Indexed by reader.
    of: Box<[CachePadded<AtomicU64>]>,
    /// How many scopes were handed out.
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

    /// Moves the reader with this index to `scope`, before its first look-up there.
    pub(super) fn enter(&self, index: usize, scope: Scope) {
        let of = &self.of[index];
        let scope = scope.0.into();
        // Only the reader with this index writes here.
        if of.load(Ordering::Relaxed) == scope {
            return;
        }
        // Release: a scan that finds the reader here sees what it did in its last scope.
        of.store(scope, Ordering::Release);
        // Pairs with the fence in `Qsbr::start`, as does the one of a reader that goes online: if a
        // scan finds the reader elsewhere, its `start` came before this fence, and so the reader's
        // later look-ups see its removal.
        fence(Ordering::SeqCst);
    }

    /// Whether the reader with this index may have what was removed in `scope`.
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
    fn tokens_hold_their_parts_and_come_in_order() {
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
