//! For tests of domains and of what uses them: checks that any domain must pass, and faults.
//!
//! * [`suite`]: the contract of a [`Domain`](ringfence_iommu::Domain), as checks from a device's
//!   point of view.
//! * [`Faulty`]: a domain around a domain, some of whose calls fail.

mod faulty;
pub mod suite;

pub use faulty::{Faulty, Kind, Stage, When};
