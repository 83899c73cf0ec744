//! Pinning pages of this process.
