//! The DMA API against a domain that behaves as badly as a device may, and an allocator that reuses
//! addresses as eagerly as one can.
#![cfg(not(loom))]

mod allocator_time;
mod batch;
mod failures;
mod lazy;
mod lists;
mod mock;
mod oracle;
mod strict;
mod watch;
