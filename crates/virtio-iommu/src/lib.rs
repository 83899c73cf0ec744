//! virtio-iommu (virtio 1.3, section 5.13), both ends.
//!
//! Three layers, each usable without the ones above it:
//!
//! * [`wire`]: the format. Checked accessors over bytes, small types that cannot hold an illegal
//!   value ([`wire::Request`], [`wire::IommuConfig`], [`wire::FaultRecord`]), and
//!   parsing and emitting as inverses of each other.
//! * [`device`]: the device. A [`device::Device`] keeps domains and attachments and maps into any
//!   [`Domain`](ringfence_iommu::Domain) that its [`device::Backing`] makes; a
//!   [`device::RequestQueue`] serves a request virtqueue without ever blocking its thread; a
//!   [`device::EventQueue`] delivers faults.
//! * [`driver`]: the driver. A [`driver::Driver`] owns the request virtqueue of one device, and
//!   each [`driver::ViommuDomain`] it makes *is* a [`Domain`](ringfence_iommu::Domain): MAP and
//!   UNMAP are queued, sync points kick and wait, and what the device answers is reported, never
//!   dropped.
//! * [`kit`]: the conformance kit. The device's rules as checks that run on any virtio-iommu, this
//!   one or another, behind a small trait.
//!
//! The path of a mapping from end to end: `map_pages` notes it in the domain's shadow and queues a
//! MAP; `iotlb_sync_map` kicks (if the device sleeps) and waits until everything queued before it
//! is answered; on the other side [`device::RequestQueue::poll`] applies it to the domain and
//! publishes the reply. An UNMAP's reply is published only once the invalidation is over, so that
//! `iotlb_sync` returning means that no access succeeds any more.
//!
//! In a *lazy* domain (a proposal, oasis-tcs/virtio-spec#204, behind the feature bit
//! [`LAZY_IOTLB_FLUSH`](wire::Features::LAZY_IOTLB_FLUSH) of our own choice, which both ends use
//! only if an option enables it) an UNMAP is answered at once, and a request of its own,
//! IOTLB_FLUSH, waits for the invalidation of all that was unmapped before it.
//!
//! Rule numbers in comments and tests (`rule V22`, `rule L64`) are those of the project's table of
//! rules; V rules stem from section 5.13 of the specification.
// Exceptions: `unsafe impl Domain`, and code that names host memory as a target.
#![deny(unsafe_code)]

// Unit tests inside the modules use the same kit as the integration tests.
#[cfg(test)]
extern crate self as ringfence_virtio_iommu;

pub mod device;
pub mod driver;
pub mod kit;
pub mod wire;
