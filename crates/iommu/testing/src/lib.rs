#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`suite`]: the contract of a [`Domain`](ringfence_iommu::Domain), as checks from a device's
//!   point of view.
//! * [`Faulty`]: a domain around a domain, some of whose calls fail.

mod faulty;
pub mod suite;

pub use faulty::{Faulty, Kind, Stage, When};
