//! What the kit needs of a device to judge it.

use std::error::Error;

/// A device under test, seen from its driver and from the endpoints behind it.
///
/// Methods that return an `Option` are for what not every subject can do: `None` means that the
/// subject cannot, and the checks that need it are not applicable.
pub trait Subject {
    /// The feature bits on offer. Only those of the device type are examined.
    fn offered(&self) -> u64;

    /// A device reset, and then all that a driver does before its first request: agrees on
    /// `features` (bits of the device type; the subject adds those that the transport needs), sets
    /// up the queues, sets DRIVER_OK. The event queue has no buffers afterwards. Also called to
    /// recover after [`Failed::Timeout`].
    ///
    /// # Errors
    /// The device cannot be used any more.
    fn start(&mut self, features: u64) -> Result<(), Failed>;

    /// Reads the configuration space (40 bytes) from `offset`.
    ///
    /// # Errors
    /// It cannot be read.
    fn read_config(&mut self, offset: usize, out: &mut [u8]) -> Result<(), Failed>;

    /// Writes the configuration space.
    ///
    /// # Errors
    /// The write did not get through. A device that ignores it is no error.
    fn write_config(&mut self, offset: usize, data: &[u8]) -> Result<(), Failed>;

    /// Puts one request into the request queue and waits for it: descriptors with `readable` and
    /// descriptors with `writable` (up to 72 bytes, and 16 KiB and a tail), of at most `piece` bytes
    /// each: usually one of each, and 40 in all at most. There is none where it is empty (never
    /// both). The device finds in its buffers what `writable` holds, and `writable` holds afterwards
    /// what is in the buffers, also behind the used length. Returns the used length.
    ///
    /// # Errors
    /// [`Failed::Timeout`] if the request does not come back within the subject's time-out.
    fn request(
        &mut self,
        piece: usize,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<u32, Failed>;

    /// The endpoints behind the device that may be used. One is needed, two are better.
    fn endpoints(&self) -> Vec<u32>;

    /// A number that is no endpoint's.
    fn absent_endpoint(&self) -> u32;

    /// The first and the last address of guest-physical memory that accesses may reach, for
    /// exclusive use by the kit. The kit uses 32 pages of it, of 4 KiB or of the granule if that is
    /// larger: it should have that alignment and length.
    fn memory(&self) -> (u64, u64);

    /// Addresses of the endpoints (first and last) that the subject maps for itself, around its
    /// accesses: the kit maps nothing there.
    fn kept(&self) -> Option<(u64, u64)> {
        None
    }

    /// Reads guest memory: `out.len()` bytes at `address`, within [`memory`](Self::memory).
    fn peek(&mut self, address: u64, out: &mut [u8]);

    /// Writes guest memory, within [`memory`](Self::memory).
    fn poke(&mut self, address: u64, bytes: &[u8]);

    /// Has an endpoint access `bytes.len()` bytes (a multiple of [`ACCESS`]) at `iova`.
    ///
    /// A read fills `bytes` with what the endpoint got. A write puts `bytes` there; an endpoint
    /// that cannot choose what it writes replaces them by what it did write.
    ///
    /// # Errors
    /// [`Refused`]: the endpoint was kept from it. What the kit finds in `bytes` then is of no
    /// meaning.
    fn access(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        bytes: &mut [u8],
    ) -> Option<Result<(), Refused>> {
        let _ = (endpoint, iova, write, bytes);
        None
    }

    /// Puts an empty buffer of `len` bytes into the event queue.
    fn post_event_buffer(&mut self, len: usize) -> Option<Result<(), Failed>> {
        let _ = len;
        None
    }

    /// The next buffer that the device gave back; `None` if there is none within a moment.
    ///
    /// # Errors
    /// The queue is broken.
    fn next_event(&mut self) -> Result<Option<Event>, Failed> {
        Ok(None)
    }

    /// A system reset, as opposed to the device reset of [`start`](Self::start), which follows.
    fn system_reset(&mut self) -> Option<Result<(), Failed>> {
        None
    }
}

/// Accesses are multiples of this many bytes, the least that a block device transfers.
pub const ACCESS: usize = 512;

/// A buffer of the event queue, as it came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The used length.
    pub used: u32,
    /// All bytes of the buffer, those behind the used length too.
    pub bytes: Vec<u8>,
}

/// An access that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Why there is no reply.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// The device did not return a buffer in time.
    #[error("the device did not reply")]
    Timeout,
    /// The device, or the way to it, broke.
    #[error(transparent)]
    Broken(Box<dyn Error + Send + Sync>),
}
