//! A process that dies before one of its stores.

use std::cell::Cell;

/// The panic payload that simulates a death.
pub(super) struct Died;

thread_local! {
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// The thread dies before it has made one more than `stores`.
pub(super) fn after(stores: u64) {
    LEFT.set(stores);
}

/// How many stores are left.
pub(super) fn left() -> u64 {
    LEFT.get()
}

/// Before a store.
pub(super) fn point() {
    match LEFT.get().checked_sub(1) {
        Some(left) => LEFT.set(left),
        None => std::panic::resume_unwind(Box::new(Died)),
    }
}
