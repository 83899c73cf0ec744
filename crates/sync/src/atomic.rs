//! Atomics, fences and the spin hint: those of `core`, or of the model checker under `cfg(loom)`.

#[cfg(loom)]
pub use crate::model::{
    AtomicBool, AtomicI8, AtomicI16, AtomicI32, AtomicI64, AtomicIsize, AtomicPtr, AtomicU8,
    AtomicU16, AtomicU32, AtomicU64, AtomicUsize, fence, fence as leading_fence,
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

/// A [`fence`] for a thread whose next access to shared memory is a read-modify-write, of at least
/// [`AcqRel`](Ordering::AcqRel). On x86 that orders as the fence does, so that there it is only one for the
/// compiler, and takes no time.
#[cfg(not(loom))]
#[inline(always)]
pub fn leading_fence(order: Ordering) {
    if cfg!(any(target_arch = "x86_64", target_arch = "x86")) {
        core::sync::atomic::compiler_fence(order);
    } else {
        fence(order);
    }
}

/// The spin hint, at the same path as in `core`.
pub mod hint {
    pub use super::spin_loop;
}
