//! Waiting for another thread in a model.

/// Stands in for crossbeam's. Every turn of a spin loop yields, or the model checker would explore
/// spinning for ever.
#[derive(Debug, Default)]
pub struct Backoff;

#[allow(missing_docs)]
impl Backoff {
    pub const fn new() -> Backoff {
        Backoff
    }

    pub fn spin(&self) {
        loom::thread::yield_now();
    }

    pub fn snooze(&self) {
        loom::thread::yield_now();
    }
}
