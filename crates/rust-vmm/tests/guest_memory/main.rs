//! rust-vmm's memory traits over an IOTLB: accesses, leases, waiting, chains of virtio-queue, and
//! random devices against plain memory.

mod accesses;
mod chains;
mod front_end;
mod leases;
mod oracle;
mod rings;
mod waiting;
