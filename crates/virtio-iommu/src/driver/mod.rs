//! The driver: one [`Driver`] per device, one [`ViommuDomain`] per address space.
//!
//! MAP and UNMAP are put into the request queue at once, where a polling device sees them, but the
//! device is kicked, and waited for, only at the points where [`Domain`](ringfence_iommu::Domain)
//! demands a result: `iotlb_sync_map`, `iotlb_sync`, `flush_iotlb_all`, and when the ring is full
//! (rule [L64]). The device's replies are kept until then and reported.
//!
//! [L64]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l64

mod batch;
mod core;
#[allow(unsafe_code)]
mod domain;
mod events;
mod report;
mod retired;
mod ring;
mod shadow;
mod stretch;
mod stretches;
mod transport;
mod wait;

pub use self::core::{Buffers, Driver, DriverConfig, Stats, negotiate, negotiate_proposed};
pub use domain::ViommuDomain;
pub use events::EventReceiver;
pub use ringfence_sync::{
    histogram::{Histogram, HistogramSnapshot},
    wait::Notify,
};
pub use transport::Transport;
