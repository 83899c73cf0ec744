//! What a device is to a [`Server`](crate::Server).

use crate::{BackendChannel, ConfigWrite, HandlerError, Iotlb, ProtocolFeatures, RingAddresses};
use ringfence_mem::Memory;
use std::{os::fd::OwnedFd, sync::Arc};

/// What a ring starts with.
#[derive(Debug)]
pub struct RingSetup {
    /// How many descriptors: a power of two, at most [`Handler::max_ring_size`].
    pub size: u16,
    /// Where its three areas are: addresses of the front end's process, or IOVAs if
    /// ACCESS_PLATFORM was negotiated.
    pub addresses: RingAddresses,
    /// The index of the first entry of the available ring to look at (split rings), or the packed
    /// ring's two positions with their wrap bits.
    pub base: u32,
    /// What the driver notifies the device with, non-blocking; `None`: the device must poll.
    pub kick: Option<OwnedFd>,
    /// Whether the ring may have side effects yet.
    pub enabled: bool,
}

/// The device behind a [`Server`](crate::Server). All values were checked against the protocol and the state of
/// the connection before a method is called; all methods are called on the thread that serves.
///
/// An error refuses the request: the front end is told if it asked to be (REPLY_ACK), and
/// otherwise the connection ends.
pub trait Handler {
    /// The virtio features that the device offers. (The server itself offers
    /// `VHOST_USER_F_PROTOCOL_FEATURES`, bit 30.)
    fn features(&self) -> u64;

    /// The protocol features that the device offers; the server removes those that it does not
    /// implement.
    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::MQ
            | ProtocolFeatures::CONFIG
            | ProtocolFeatures::RESET_DEVICE
    }

    /// How many rings the device has.
    fn queues(&self) -> u16;

    /// The largest ring that the device takes.
    fn max_ring_size(&self) -> u16 {
        32768
    }

    /// The front end has settled on these virtio features (a subset of those offered, bit 30
    /// removed).
    ///
    /// # Errors
    /// The device cannot work with them.
    fn set_features(&mut self, features: u64) -> Result<(), HandlerError>;

    /// New memory, checked and mapped; replaces the memory before, also under running rings.
    ///
    /// # Errors
    /// The device cannot take it.
    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError>;

    /// The ring starts. It is not running before.
    ///
    /// # Errors
    /// The addresses lead nowhere, say.
    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError>;

    /// The ring stops, for good: when this returns, the device touches it no more. Returns the
    /// index of the next available entry (see [`RingSetup::base`]). Called for running rings only,
    /// also when the connection ends or the device is reset.
    ///
    /// # Errors
    /// The device could not stop it: the connection ends.
    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError>;

    /// A running ring's [`RingSetup::enabled`] changes.
    ///
    /// # Errors
    /// The device cannot.
    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError>;

    /// A running ring's areas move.
    ///
    /// # Errors
    /// The addresses lead nowhere, say.
    fn move_ring(&mut self, ring: u16, addresses: RingAddresses) -> Result<(), HandlerError> {
        let _ = (ring, addresses);
        Err(HandlerError::new("a running ring cannot be moved"))
    }

    /// What the device notifies the driver with, non-blocking; `None`: not at all. May come at any time, before
    /// the ring starts and while it runs, and holds over stops and starts.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_call(&mut self, ring: u16, call: Option<OwnedFd>) -> Result<(), HandlerError>;

    /// What the device tells the front end with that a ring is broken. As
    /// [`set_call`](Self::set_call); by default dropped.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_err(&mut self, ring: u16, err: Option<OwnedFd>) -> Result<(), HandlerError> {
        let _ = (ring, err);
        Ok(())
    }

    /// Fills `out` from the configuration space at `offset`; at most 256 bytes.
    ///
    /// # Errors
    /// There is no such part: the front end is told so.
    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        let _ = (offset, out);
        Err(HandlerError::new("no configuration space"))
    }

    /// Writes the configuration space.
    ///
    /// # Errors
    /// The field is not writable, or does not exist.
    fn set_config(
        &mut self,
        offset: u32,
        why: ConfigWrite,
        data: &[u8],
    ) -> Result<(), HandlerError> {
        let _ = (offset, why, data);
        Err(HandlerError::new("the configuration space cannot be written"))
    }

    /// The device is reset: every ring was stopped before; features are unset, rings disabled.
    ///
    /// # Errors
    /// The device cannot.
    fn reset(&mut self) -> Result<(), HandlerError> {
        Ok(())
    }

    /// The channel on which the back end may send requests of its own (IOTLB misses).
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_backend_channel(&mut self, channel: Arc<BackendChannel>) -> Result<(), HandlerError> {
        let _ = channel;
        Ok(())
    }

    /// An IOTLB message, well-formed, and only after ACCESS_PLATFORM was negotiated; an update
    /// lies within the memory. When this returns `Ok`, it has taken effect: no worker uses a
    /// translation any more that it made untrue (rule D15).
    ///
    /// # Errors
    /// Refused: the front end gets a non-zero answer.
    fn iotlb(&mut self, message: Iotlb) -> Result<(), HandlerError> {
        let _ = message;
        Err(HandlerError::new("the device has no IOTLB"))
    }

    /// The front end has answered a message of the [`BackendChannel`] whose answer was wanted (rule
    /// D9): whether it could do what was asked, such as to send a translation.
    fn channel_answer(&mut self, message: Iotlb, done: bool) {
        let _ = (message, done);
    }

    /// A request was refused, by the device or for its content, and the front end was told; the
    /// connection goes on. For logs.
    fn refused(&mut self, request: u32, why: &HandlerError) {
        let _ = (request, why);
    }
}
