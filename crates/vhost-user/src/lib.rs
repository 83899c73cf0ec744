#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! - [`msg`]: the wire: header, payloads, the IOTLB messages; parse and emit are inverses.
//! - [`Frontend`]: sends requests, and waits with a time-out for the reply where there is one.
//! - [`Server`]: replies to requests, and calls a [`Handler`] with values that were checked:
//!   whatever bytes and descriptors arrive, the worst outcome is a closed connection with a reason.
//! - [`BackendChannel`] and [`FrontendChannel`]: the two ends of the channel on which the back end
//!   sends requests: IOTLB misses, above all.
//! - [`InflightRegion`]: what a back end has taken and not completed, so that another can go on.
//! - [`Keeper`]: keeps what another process needs to take over a connection.
//!
//! Rings are stopped and disabled at first, start with SET_VRING_KICK and stop with GET_VRING_BASE
//! (rule [D28]). The [`Server`] keeps that state: it never starts a running ring of a [`Handler`]
//! or stops a stopped one, and stops every ring when the connection ends.
//!
//! The IOTLB messages are read, checked and replied to here; the device provides the cache that
//! they fill.
//!
//! [D28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d28

#![forbid(unsafe_code)]

mod backend;
mod backend_channel;
mod channel;
mod error;
mod frontend;
mod frontend_channel;
mod inbox;
mod inflight;
mod iotlb;
mod keeper;
pub mod msg;
mod server;

pub use backend::{Handler, Offer, RingSetup};
pub use backend_channel::BackendChannel;
pub use error::{HandlerError, WireError};
pub use frontend::{Frontend, FrontendError, IotlbHandle};
pub use frontend_channel::{BackendMessage, BackendRequest, FrontendChannel};
pub use inflight::{
    InflightError, InflightRegion, PackedBuffer, PackedDescriptor, PackedInflight, SplitInflight,
};
pub use iotlb::{BadIotlb, Iotlb, IotlbWire};
pub use keeper::{ConnectionState, Keeper, ResumeError, SavedConnection};
pub use msg::{ConfigWrite, F_ACCESS_PLATFORM, F_LOG_ALL, F_PROTOCOL_FEATURES};
pub use msg::{ProtocolFeatures, RingAddresses};
pub use server::{ServeError, Server, Shutdown};
