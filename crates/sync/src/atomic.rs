//! Atomics, fences and the spin hint: those of `core`, or of the model checker under `cfg(loom)`.

#[cfg(loom)]
pub use crate::model::{
    AtomicBool, AtomicI8, AtomicI16, AtomicI32, AtomicI64, AtomicIsize, AtomicPtr, AtomicU8,
    AtomicU16, AtomicU32, AtomicU64, AtomicUsize, fence,
};
#[cfg(not(loom))]
pub use core::{
    hint::spin_loop,
    sync::atomic::{
        AtomicBool, AtomicI8, AtomicI16, AtomicI32, AtomicI64, AtomicIsize, AtomicPtr, AtomicU8,
        AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    },
};
#[cfg(loom)]
pub use loom::{hint::spin_loop, sync::atomic::Ordering};

/// The spin hint, at the same path as in `core`.
pub mod hint {
    pub use super::spin_loop;
}
