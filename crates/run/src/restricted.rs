//! io_uring instances that can do only what they are made for.

use std::{io, sync::Once};

use io_uring::{Builder, IoUring, cqueue, register::Restriction, squeue};

/// `IORING_REGISTER_EVENTFD`, `IORING_UNREGISTER_EVENTFD`: the event that completions signal.
const REGISTER_EVENTFD: u8 = 4;
const UNREGISTER_EVENTFD: u8 = 5;

/// A ring of `entries` that is restricted to `operations` for good, though its event may be
/// changed. Kernels before 5.10 have no restrictions: there it can do all that io_uring can.
///
/// # Errors
/// The kernel has no io_uring, or forbids it here.
pub fn ring<const N: usize>(
    how: &mut Builder<squeue::Entry, cqueue::Entry>,
    entries: u32,
    operations: [Restriction; N],
) -> io::Result<IoUring> {
    let ring = match how.clone().setup_r_disabled().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| {
                tracing::warn!("this kernel (before 5.10) cannot restrict what an io_uring does: it could open files");
            });
            return how.build(entries);
        }
        ring => ring?,
    };
    let events = [REGISTER_EVENTFD, UNREGISTER_EVENTFD].map(Restriction::register_op);
    let mut all: Vec<Restriction> = operations.into_iter().chain(events).collect();
    ring.submitter().register_restrictions(&mut all)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}
