//! The device: requests in, domains changed, faults out.
//!
//! [`Device`] holds what the specification gives a device (domains, attachments, the configuration)
//! and maps into whatever [`Backing`] makes. It is shared: the control thread reads the
//! configuration while one or more threads serve request queues, and MAP and UNMAP of different
//! request queues run in parallel. [`RequestQueue`] serves one virtqueue without blocking;
//! [`EventQueue`] delivers what [`FaultQueue`] collects. With a [`Journal`], a device that loses
//! its process goes on in the next one.

mod backing;
mod core;
mod events;
#[allow(unsafe_code)]
mod joint;
mod journal;
mod kept;
mod lazy;
#[allow(unsafe_code)]
mod mirror;
mod queue;
mod requests;
mod saved;
mod session;

pub use self::core::{Device, DeviceConfig};
pub use backing::{Backing, Binding, EndpointInfo};
pub use events::{EventQueue, FaultQueue};
pub use joint::{Joint, Outside};
pub use journal::{Completions, Journal, JournalError, Recovered, RestoreError};
pub use mirror::{HostRegion, Mirror};
pub use queue::{Counters, Progress, RequestQueue};
pub use session::Session;
