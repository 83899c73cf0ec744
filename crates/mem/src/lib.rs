//! Memory shared with a guest or another process: sealed files, regions, checked access, SIGBUS.
//!
//! The end that owns the memory (a driver, a VMM, a front end) makes a [`GuestRam`]: a sealed
//! memory file, mapped. It hands the file over with a [`Region`] that gives the position of the
//! bytes in the guest's physical addresses and in its own. The end that serves (a back end) checks
//! and maps the file as a [`Memory`], and reaches it only through a [`Translate`]: [`Physical`] for
//! guest-physical addresses, [`UserAddresses`] for addresses of the front end's process, or an
//! IOTLB from another crate. `ringfence-rust-vmm` reaches the memory of a VMM that is built on
//! rust-vmm.
//!
//! The bytes may change under us at any time: they are copied or accessed as atomics, never
//! borrowed. The *file* may shrink under us too, if it was not sealed; [`sigbus`], once installed,
//! turns the signal that follows into zero bytes and an [`AccessError::Lost`].
//!
//! ```
//! use ringfence_mem::{AccessError, GuestRam, Memory, Physical, Translate};
//!
//! let ram = GuestRam::new(1 << 20, 0x4000_0000)?;
//! ram.slice(0x100, 5)?.copy_from(b"hello");
//!
//! // What a back end does, after the file and the region came over a socket:
//! let memory = Memory::map(vec![(ram.region(), ram.fd().try_clone_to_owned()?)])?;
//! let bus = Physical::new(memory);
//! let mut bytes = [0; 5];
//! bus.read(0x4000_0100, &mut bytes)?;
//! bus.check()?; // before the result is made known
//! assert_eq!(&bytes, b"hello");
//! assert!(matches!(bus.read(0x100, &mut bytes), Err(AccessError::OutsideMemory { .. })));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
mod dirty;
mod error;
mod mapping;
mod memory;
mod ram;
mod region;
mod shared;
pub mod sigbus;
mod slice;
mod translate;

pub use access::{Access, AccessError, Translate, Window};
pub use dirty::{DirtyLog, LogIndex};
pub use error::MemError;
pub use mapping::{unmap_elsewhere, unmapped_here};
pub use memory::{Found, Memory};
pub use ram::{GuestRam, ScatteredView};
pub use region::Region;
pub use shared::SharedFile;
pub use slice::{HostSlice, ReadSlice};
pub use translate::{Physical, UserAddresses};

/// The granule of everything here: 4096 bytes, on every machine that virtio and vhost-user meet.
pub const PAGE_SIZE: usize = 4096;
