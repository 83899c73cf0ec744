//! What a device may touch, over time, with every part real: the DMA API over the virtio-iommu
//! driver, virtqueues in shared memory, and, on worker threads, the IOMMU's unit and a device that
//! keeps trying addresses through its IOTLB. Or the DMA API is over a table in this process, or over a
//! front end's, which a device IOTLB asks for what it misses.
//!
//! * [`program`]: random programs of one driver; after each step the device tries everything that it
//!   may reach and much that it may not, and each refusal must come back as a fault record.
//! * [`together`]: two drivers at once, while two workers never stop; judged afterwards, access by
//!   access.
//! * [`mutants`]: a stack with one deliberate defect must not pass either of them.
//!
//! `PROPTEST_CASES` sets how many programs are run, `ORACLE_KIND` what they run over: `virtio-iommu`,
//! `lazy` (one that completes an UNMAP before its invalidation), `table`, `iotlb`, or `vhost-user` (an
//! IOTLB whose messages go over a socket). Asynchronous I/O is the device's own, or that of a
//! [`disk`].

#[path = "../../../dma/tests/api/copied.rs"]
mod copied;
mod disk;
mod front;
mod history;
mod lying;
mod messages;
mod mutants;
mod pages;
mod probe;
mod program;
mod rig;
#[path = "../common/serving.rs"]
mod serving;
mod set;
mod slots;
mod source;
mod together;
