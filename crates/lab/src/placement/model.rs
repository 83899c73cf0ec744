//! The model of the hardware's caches.
