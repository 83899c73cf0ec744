//! The DMA API against a domain that behaves as badly as a device may, and an allocator that reuses
//! addresses as eagerly as possible.
#![cfg(not(loom))]

mod allocator_time;
mod auto;
mod batch;
mod bounce;
mod bounced;
#[allow(dead_code, reason = "the oracle of ringfence-devices uses all of it")]
mod copied;
mod detector;
mod failures;
mod lazy;
mod leaks;
mod lists;
mod mock;
mod oracle;
mod persistent;
mod ram;
mod strict;
mod switch;
mod taken;
mod trust;
mod tuning;
mod watch;
