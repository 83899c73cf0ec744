//! What a device is to a [`Server`](crate::Server).

use crate::{
    BackendChannel, ConfigWrite, HandlerError, InflightRegion, Iotlb, ProtocolFeatures,
    RingAddresses, Shutdown, WireError,
};
use ringfence_mem::{DirtyLog, LogIndex, Memory};
use ringfence_run::PeerFd;
use std::sync::Arc;

/// What a ring starts with.
#[derive(Debug)]
pub struct RingSetup {
    /// How many descriptors: at most [`Handler::max_ring_size`], and of a split ring a power of two.
    pub size: u16,
    /// Where its three areas are: addresses of the front end's process, or IOVAs if
    /// ACCESS_PLATFORM was negotiated.
    pub addresses: RingAddresses,
    /// The index of the first entry of the available ring to look at (split rings), or the packed
    /// ring's two positions with their wrap bits, each below its size. `None`: a device that has ended without
    /// saying where it stood ran the ring ([`Server::resume`](crate::Server::resume)). What it took and did not
    /// give back is to be taken again, and the driver is to be told once: what was given back last it may not have
    /// been told of.
    pub base: Option<u32>,
    /// The eventfd that the driver notifies the device with; `None`: the device must poll. Reading it may
    /// block: the front end has its flags too (RWF_NOWAIT does not look at them).
    pub kick: Option<PeerFd>,
    /// Whether the ring may have side effects yet.
    pub enabled: bool,
    /// Whether it goes on from [another process](crate::Server::resume), and no driver has started it now.
    pub resumed: bool,
}

/// The device behind a [`Server`](crate::Server). All values were checked against the protocol and the state of
/// the connection before a method is called; all methods are called on the thread that serves.
///
/// An error refuses the request: the front end is told if it asked to be (REPLY_ACK), and
/// otherwise the connection ends.
pub trait Handler {
    /// A connection is about to be served. Until [`disconnected`](Self::disconnected), `connection`
    /// says whether the front end is there. What a device waits for on the front end's behalf has no
    /// other limit (rule D15), so that it keeps the handle if it may wait.
    fn connected(&mut self, connection: Shutdown) {
        let _ = connection;
    }

    /// The virtio features that the device offers. (The server itself offers
    /// `VHOST_USER_F_PROTOCOL_FEATURES`, bit 30, and, with LOG_SHMFD, `VHOST_F_LOG_ALL`, bit 26.)
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

    /// Whether another process can [go on](crate::Keeper) with what was settled on.
    fn can_be_resumed(&self) -> bool {
        true
    }

    /// Another process goes on with the connection: its rings are about to be stopped for that, and for no other
    /// reason.
    fn leaves(&mut self) {}

    /// The largest ring that the device takes.
    fn max_ring_size(&self) -> u16 {
        32768
    }

    /// The front end has settled on these virtio features (a subset of those offered, bits 30 and
    /// 26 removed). No ring runs.
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
    /// With ACCESS_PLATFORM it is no error that the addresses cannot be translated yet: the ring
    /// waits for the translations.
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

    /// What the device notifies the driver with, of any kind; `None`: not at all. May come at any time, before
    /// the ring starts and while it runs, and holds over stops and starts.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError>;

    /// What the device tells the front end with that a ring is broken. As
    /// [`set_call`](Self::set_call); by default dropped.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_err(&mut self, ring: u16, err: Option<PeerFd>) -> Result<(), HandlerError> {
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
    /// translation any more that it made untrue (rule D15), however long that takes: a device gives up
    /// only when the connection [is over](Shutdown::is_over).
    ///
    /// # Errors
    /// Refused: the front end gets a non-zero answer.
    fn iotlb(&mut self, message: Iotlb) -> Result<(), HandlerError> {
        let _ = message;
        Err(HandlerError::new("the device has no IOTLB"))
    }

    /// Messages as [`iotlb`](Self::iotlb) takes them that came together, in their order; pushes an
    /// outcome for each to `outcomes`, which is empty. Each has taken effect when this returns: a
    /// device whose workers have to be waited for can wait once for all of them.
    fn iotlb_all(&mut self, messages: &[Iotlb], outcomes: &mut Vec<Result<(), HandlerError>>) {
        outcomes.extend(messages.iter().map(|message| self.iotlb(*message)));
    }

    /// No IOTLB message is there, and no answer to a miss is about to come: a device whose workers
    /// are better told of several answers at once tells them now at the latest. Called often.
    fn settled(&mut self) {}

    /// The front end has answered a message of the [`BackendChannel`] whose answer was wanted (rule
    /// D9), sent with `number`: whether it could do what was asked, such as to send a translation.
    fn channel_answer(&mut self, message: Iotlb, number: u64, done: bool) {
        let _ = (message, number, done);
    }

    /// The [`BackendChannel`] is gone: the front end has closed it. What was asked on it will not be
    /// answered; the connection goes on.
    fn channel_lost(&mut self, why: &WireError) {
        let _ = why;
    }

    /// Where the device notes what it has taken and not yet completed, so that another process can
    /// go on after a crash of this one (see [`InflightRegion`]). Comes before the rings start; only
    /// if the device offers INFLIGHT_SHMFD.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        let _ = inflight;
        Err(HandlerError::new("the device keeps no account of requests in flight"))
    }

    /// What a dirty log is indexed by (rule D26), if the front end brings one.
    fn log_index(&self) -> LogIndex {
        LogIndex::Physical
    }

    /// Where every write to guest memory is logged from now on (rule D26); `None`: nowhere. Comes
    /// also while rings run: when it returns, all workers log. Only if the device offers LOG_SHMFD.
    ///
    /// The device marks what it writes to buffers by their addresses, and, for a ring whose
    /// [`RingAddresses::log`] is there, what it writes to the used ring: at that address and on. (With
    /// ACCESS_PLATFORM it is an IOVA as well: what is marked is what the ring's own translation says.)
    ///
    /// # Errors
    /// The device cannot log.
    fn set_log(&mut self, log: Option<Arc<DirtyLog>>) -> Result<(), HandlerError> {
        match log {
            Some(_) => Err(HandlerError::new("the device cannot log its writes")),
            None => Ok(()),
        }
    }

    /// A running ring's [`RingAddresses::log`] changes: nothing else about it does.
    ///
    /// # Errors
    /// The device cannot log.
    fn log_ring(&mut self, ring: u16, log: Option<u64>) -> Result<(), HandlerError> {
        let _ = (ring, log);
        Ok(())
    }

    /// What the front end wants to be told with that something was logged, of any kind; by default
    /// dropped, as front ends look when they need to know.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_log_event(&mut self, event: PeerFd) -> Result<(), HandlerError> {
        let _ = event;
        Ok(())
    }

    /// The driver's device status, as virtio defines it (STATUS). 0 is a reset, for which
    /// [`reset`](Self::reset) is called instead.
    ///
    /// # Errors
    /// The device cannot.
    fn set_status(&mut self, status: u8) -> Result<(), HandlerError> {
        let _ = status;
        Ok(())
    }

    /// A guest with this address has come here by migration (RARP): the device announces it.
    ///
    /// # Errors
    /// The device cannot.
    fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), HandlerError> {
        let _ = mac;
        Ok(())
    }

    /// The MTU of the guest's network (NET_MTU).
    ///
    /// # Errors
    /// The device cannot.
    fn set_mtu(&mut self, mtu: u16) -> Result<(), HandlerError> {
        let _ = mtu;
        Ok(())
    }

    /// The last ring that ran has stopped. Until a ring starts again the front end tells of no
    /// invalidation: what it had told of translations may be untrue by then (rule D21).
    fn suspended(&mut self) {}

    /// The connection has ended; every ring is stopped, and logging too. The device may be given to
    /// another [`Server`](crate::Server) then. What belonged to the connection is to be forgotten:
    /// the channel, descriptors, translations.
    fn disconnected(&mut self) {}

    /// A request was refused, by the device or for its content, and the front end was told; the
    /// connection goes on. For logs.
    fn refused(&mut self, request: u32, why: &HandlerError) {
        let _ = (request, why);
    }
}
