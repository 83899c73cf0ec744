//! rust-vmm's memory traits over an IOTLB: accesses, leases, waiting, chains of virtio-queue, the
//! adapter for `IommuMemory`, and random devices against plain memory.

mod accesses;
mod adapter;
mod chains;
mod front_end;
mod leases;
mod oracle;
mod rings;
mod waiting;
