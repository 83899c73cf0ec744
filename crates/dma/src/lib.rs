#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! From the bottom:
//!
//! * [`DmaBuffer`]: memory that stays where it is, as a list of segments in the domain's target
//!   addresses; [`Direction`]: the direction of the data, hence what the device may do.
//! * [`Policy`]: what a mapping costs and what it guarantees. The default is
//!   [`StrictMap`](Policy::StrictMap); a lazy policy must be chosen by name.
//! * [`Device::map`], of a buffer or a list of them → [`Mapping`]: one contiguous IOVA range, the
//!   [`Segment`]s to put in descriptors, and the buffer, which the mapping *owns*: the compiler
//!   refuses to touch what the device may touch. [`Mapping::unmap`] gives it back; `Drop` unmaps.
//! * [`MapBatch`] and [`UnmapBatch`]: many mappings, one sync, and no waiting for it.
//! * [`Device::alloc_coherent`] → [`Coherent`]: memory shared with the device for long, such as a
//!   ring.
//! * [`Device::map_persistent`] → [`Persistent`]: a buffer that stays mapped from one I/O to the
//!   next.
//! * [`BouncePools`]: memory that stays mapped, for mappings that are copies;
//!   [`Device::take_buffer`] → [`PoolBuffer`]: without a copy.
//! * [`Trust`]: an untrusted device is strict, whatever its policy says, and reports the
//!   reason ([`Fallback`]).
//! * [`Detector`]: reports which source lines mapped and unmapped a buffer that a device still
//!   uses.
//! * [`Choices`]: what [`Policy::Auto`] copies and what it maps, and why.
//! * [`Stats`]: counts, sampled thread time in map and unmap, and the *exposure*: bytes × time that
//!   lazily unmapped memory stayed reachable.
//!
//! # Policies
//!
//! Under a lazy policy the IOVA is never given to another buffer before its flush (rule [L19]). The
//! [`FlushTuning`] sets how large the window may be until then, in time and in bytes.
//!
//! Policy and tuning can change while the device is in use ([`Device::set_policy`],
//! [`Device::set_flush_tuning`]): unmaps that begin after such a call has returned follow it.
//!
//! A buffer that does not fill the granules it lies in is mapped rounded to them, as Linux does for
//! trusted devices: its neighbours in the first and the last granule are exposed while it is
//! mapped. For an untrusted device it is copied instead. A domain with a granule of one byte maps
//! exactly the buffer.
//!
//! # Copies
//!
//! [`BouncePools`] hold memory that stays mapped. Under [`Policy::Bounce`], under [`Policy::Auto`]
//! where that is cheaper (see [`Device::choices`]), and where a mapping would expose a buffer's
//! neighbours to an untrusted device, a mapping is a copy in one of their slots: the device never
//! reaches the buffer, and in the slot it sees the mapping's own bytes, zeros, and what it wrote
//! itself. A copy begins where its slot does. The slot stays mapped after the unmap: the device may
//! go on writing there, but reaches no buffer that way. [`Device::take_buffer`] hands out a slot to
//! be written in place. Devices of one domain share its mappings, slots included: isolation is
//! between domains, not between devices.
//!
//! # When the device fails
//!
//! A [`MapError`] has the buffer and the device's own status; [`ErrorKind`] is what the caller can
//! do about it. An [`UnmapError`] keeps the buffer, and its IOVA is quarantined: never reused, and
//! counted.
//!
//! [L19]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l19
#![deny(unsafe_code)]

mod auto;
mod batch;
#[allow(unsafe_code)]
mod bounce;
#[allow(unsafe_code)]
mod buffer;
mod config;
mod counter;
mod detect;
mod device;
#[allow(unsafe_code)]
mod error;
mod flush;
mod layout;
mod lazy;
mod map_call;
mod mapping;
mod mode;
#[allow(unsafe_code)]
mod persistent;
#[allow(unsafe_code)]
mod place;
mod placed;
mod policy;
mod port;
mod shared;
mod stats;
mod switch;
mod trust;
mod tuning;
mod waits;

pub use auto::{Calibration, CellChoice, ChoiceReason, Choices, CopyCost};
pub use batch::{MapBatch, UnmapBatch};
pub use bounce::{
    BounceConfig, BounceLimits, BounceMemory, BouncePools, BounceStats, Chunk, ClassStats, Holder,
    HostMemory, PoolBuffer, Written,
};
pub use buffer::{Direction, DmaBuffer, SharedMemory};
pub use config::{DmaConfig, Environment, TimerKind};
pub use counter::{OsThreadClock, Sampled, ThreadClock};
pub use detect::{CallSite, Cause, Detector, Explained};
pub use device::{Device, DeviceBuilder};
pub use error::{Error, ErrorKind, MapError, OutOfBounds, SetupError, SwitchError, UnmapError};
pub use layout::Segment;
pub use mapping::{Coherent, Mapping, Returned, StaleIova};
pub use persistent::Persistent;
pub use policy::{Policy, QueueKind};
pub use stats::{Exposure, Stats};
pub use trust::{Distrust, Fallback, Finding, Refused, Trust, TrustError};
pub use tuning::{FlushTuning, TuningError};
pub use waits::Waits;
