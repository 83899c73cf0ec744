//! The conformance kit: the device's rules ([V1] to [V30]) as checks of any virtio-iommu.
//!
//! A [`Subject`] is a device and its environment: a driver that sends bytes, and, if there is one,
//! an endpoint that tries accesses. [`run`] does the checks, each from a device reset, so that
//! their order does not matter, and returns a [`Report`]. The requirements come from section 5.13
//! of virtio 1.3 alone; where a rule has no keyword there because it says what a thing *is* (what a
//! mapping translates, which endpoints are in bypass mode), it binds as a MUST.
//!
//! A check sees the device as a driver does: by statuses and used lengths, by the configuration, by
//! what an endpoint reaches, by fault reports. Whether something is still mapped is tested by an
//! access, or if the subject cannot make one, by a MAP over it.
//!
//! [V1]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v1
//! [V30]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v30

mod bench;
mod checks;
mod report;
mod run;
mod subject;

pub use bench::Check;
pub use report::{Finding, Level, Mismatch, Outcome, Report};
pub use run::{checks, run};
pub use subject::{ACCESS, Event, Failed, Refused, Subject};
