#![doc = include_str!("../README.md")]
//!
//! # What is inside
//!
//! * [`wire`]: the format. Small types that cannot hold an illegal value ([`wire::Request`],
//!   [`wire::IommuConfig`], [`wire::FaultRecord`]), with parsing and emitting as inverses of each
//!   other.
//! * [`device`]: a [`device::Device`] keeps domains and attachments and maps into any
//!   [`Domain`](ringfence_iommu::Domain) that its [`device::Backing`] makes; a
//!   [`device::RequestQueue`] serves a request virtqueue without ever blocking its thread; a
//!   [`device::EventQueue`] delivers faults.
//! * [`driver`]: a [`driver::Driver`] owns the request virtqueue of one device, and each
//!   [`driver::ViommuDomain`] that it makes is a [`Domain`](ringfence_iommu::Domain): MAP and UNMAP
//!   are queued, sync points kick and wait.
//! * [`kit`]: the conformance kit. The device's rules as checks that run on any virtio-iommu, this
//!   one or another, behind a small trait.
//!
//! In a *lazy* domain an UNMAP is completed at once, and a request of its own, IOTLB_FLUSH, waits
//! for the invalidation of all that was unmapped before it
//! ([`LAZY_IOTLB_FLUSH`](wire::Features::LAZY_IOTLB_FLUSH)).
//!
//! Rule numbers in comments and tests ([V22], [L64]) are those of the project's table of rules; V
//! rules stem from section 5.13 of the specification.
//!
//! [V22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v22
//! [L64]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#l64
// Exceptions: `unsafe impl Domain`, and code that names host memory as a target.
#![deny(unsafe_code)]

// Unit tests inside the modules use the same kit as the integration tests.
#[cfg(test)]
extern crate self as ringfence_virtio_iommu;

pub mod device;
pub mod driver;
pub mod kit;
pub mod wire;
