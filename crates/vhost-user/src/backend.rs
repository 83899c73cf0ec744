//! The interface between a [`Server`](crate::Server) and its device.

use crate::{
    BackendChannel, ConfigWrite, HandlerError, InflightRegion, Iotlb, ProtocolFeatures,
    RingAddresses, Shutdown, WireError,
};
use ringfence_mem::{DirtyLog, Memory};
use ringfence_run::PeerFd;
use std::sync::Arc;

/// The state in which a ring starts.
#[derive(Debug)]
pub struct RingSetup {
    /// The number of descriptors: at most [`Offer::max_ring_size`], and for a split ring a power
    /// of two.
    pub size: u16,
    /// Where its three areas are: addresses in the front end's process, or IOVAs if ACCESS_PLATFORM
    /// was negotiated.
    pub addresses: RingAddresses,
    /// The index of the first available-ring entry to look at (split rings), or the packed ring's
    /// two positions with their wrap bits, each below its size. `None`: a process that died without
    /// reporting its position ran the ring ([`Server::resume`](crate::Server::resume)). The device
    /// takes again what that process had taken and not given back, and notifies the driver once, as
    /// the notification of what was given back last may be missing.
    pub base: Option<u32>,
    /// The eventfd with which the driver notifies the device; `None`: the device must poll. A plain
    /// read may block, as the front end shares the flags of the open file (one with RWF_NOWAIT
    /// ignores them).
    pub kick: Option<PeerFd>,
    /// Whether the ring may have side effects yet.
    pub enabled: bool,
    /// Whether the ring continues from [another process](crate::Server::resume), without a driver
    /// having started it now.
    pub resumed: bool,
}

/// What a device offers, as long as it has a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The virtio features. (The server itself offers `VHOST_USER_F_PROTOCOL_FEATURES`, bit 30,
    /// and, with LOG_SHMFD, `VHOST_F_LOG_ALL`, bit 26.)
    pub features: u64,
    /// Features that it accepts although it may not offer them: an earlier process may have offered
    /// them, and the front end does not read the offer again.
    pub tolerated: u64,
    /// The protocol features; the server removes those that it does not implement.
    pub protocol: ProtocolFeatures,
    /// How many rings there are.
    pub queues: u16,
    /// The reply to GET_QUEUE_NUM: some back ends of networks count pairs of rings.
    pub queue_num: u16,
    /// The largest ring that the device takes.
    pub max_ring_size: u16,
}

impl Offer {
    /// An offer of these features and of rings of up to 32768 descriptors, without protocol
    /// features.
    pub const fn new(features: u64, queues: u16) -> Offer {
        let protocol = ProtocolFeatures::empty();
        Offer { features, tolerated: 0, protocol, queues, queue_num: queues, max_ring_size: 32768 }
    }
}

/// The device behind a [`Server`](crate::Server). The server checks all values against the protocol
/// and the state of the connection before it calls a method, and calls all methods on the thread
/// that serves.
///
/// An error refuses the request: the server reports it to the front end if the request needs an
/// acknowledgement (REPLY_ACK), and otherwise ends the connection.
#[allow(unused_variables, reason = "defaults that do nothing")]
pub trait Handler {
    /// A connection is about to be served. Until [`disconnected`](Self::disconnected), `connection`
    /// shows whether the front end is there. Nothing else limits what a device waits for on the
    /// front end's behalf (rule [D15]), so a device that may wait keeps the handle.
    ///
    /// [D15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d15
    fn connected(&mut self, connection: Shutdown) {}

    /// What the device offers.
    fn offer(&self) -> Offer;

    /// Whether another process can [take over](crate::Keeper) with what was negotiated.
    fn can_be_resumed(&self) -> bool {
        true
    }

    /// Another process takes over the connection: the server is about to stop the rings, for that
    /// reason only.
    fn leaves(&mut self) {}

    /// The front end has negotiated these virtio features (a subset of those offered and
    /// [tolerated](Offer::tolerated), without bits 30 and 26). No ring runs.
    ///
    /// # Errors
    /// The device cannot work with them.
    fn set_features(&mut self, features: u64) -> Result<(), HandlerError>;

    /// New memory, checked and mapped; it replaces the previous memory, also under running rings.
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
    /// For example, the addresses lie outside the memory.
    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError>;

    /// Stops the ring for good: once this returns, the device no longer touches it. Returns the
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
    /// For example, the addresses lie outside the memory.
    fn move_ring(&mut self, ring: u16, addresses: RingAddresses) -> Result<(), HandlerError> {
        Err(HandlerError::new("a running ring cannot be moved"))
    }

    /// The descriptor, of any kind, with which the device notifies the driver; `None`: no
    /// notifications. May be set at any time, before the ring starts and while it runs, and stays
    /// set across stops and starts.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError>;

    /// The descriptor with which the device signals to the front end that a ring is broken. As
    /// [`set_call`](Self::set_call); by default dropped.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_err(&mut self, ring: u16, err: Option<PeerFd>) -> Result<(), HandlerError> {
        Ok(())
    }

    /// Fills `out` from the configuration space at `offset`; at most 256 bytes.
    ///
    /// # Errors
    /// There is no such part; the server reports that to the front end.
    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
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
        Err(HandlerError::new("the configuration space cannot be written"))
    }

    /// The device is reset. The server has stopped every ring; features are unset, rings disabled.
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
        Ok(())
    }

    /// Carries out an IOTLB message, which is well-formed; called only after ACCESS_PLATFORM was
    /// negotiated. An update lies within the memory. When this returns `Ok`, the message has taken
    /// effect: no worker uses a translation that it made stale (rule [D15]). A device waits for
    /// that without a limit, and gives up only when the connection [is over](Shutdown::is_over).
    ///
    /// # Errors
    /// Refused: the front end gets a non-zero reply.
    ///
    /// [D15]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d15
    fn iotlb(&mut self, message: Iotlb) -> Result<(), HandlerError> {
        Err(HandlerError::new("the device has no IOTLB"))
    }

    /// Carries out IOTLB messages that arrived together, in their order, each as
    /// [`iotlb`](Self::iotlb) does; pushes an outcome for each to `outcomes`, which is empty. All
    /// have taken effect when this returns: a device that has to wait for its workers can wait once
    /// for all messages.
    fn iotlb_all(&mut self, messages: &[Iotlb], outcomes: &mut Vec<Result<(), HandlerError>>) {
        outcomes.extend(messages.iter().map(|message| self.iotlb(*message)));
    }

    /// No IOTLB message is pending, and no update for a miss is about to come: a device that
    /// collects updates before it wakes its workers wakes them now at the latest. Called often.
    fn settled(&mut self) {}

    /// The front end has replied to a message that was sent on the [`BackendChannel`] with `number`
    /// for a reply (rule [D9]). `done`: whether it did what the message requires, such as
    /// sending an update for a miss.
    ///
    /// [D9]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d9
    fn channel_reply(&mut self, message: Iotlb, number: u64, done: bool) {}

    /// The [`BackendChannel`] is gone: the front end has closed it. Its messages without a
    /// reply get none; the connection goes on.
    fn channel_lost(&mut self, why: &WireError) {}

    /// Where the device records what it has taken and not yet completed, so that another process
    /// can go on if this one crashes (see [`InflightRegion`]). Set before the rings start; only if
    /// the device offers INFLIGHT_SHMFD.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_inflight(&mut self, inflight: Arc<InflightRegion>) -> Result<(), HandlerError> {
        Err(HandlerError::new("the device keeps no account of requests in flight"))
    }

    /// Where every write to guest memory is logged from now on (rule [D26]); `None`: nowhere. Also
    /// called while rings run: when it returns, all workers log. Only if the device offers
    /// LOG_SHMFD.
    ///
    /// The device marks its writes to buffers by the buffers' addresses. For a ring that has a
    /// [`RingAddresses::log`], it also marks its writes to the used ring, from that address on.
    /// (With ACCESS_PLATFORM that address is an IOVA as well; the pages marked are those that the
    /// ring's own translation gives.)
    ///
    /// # Errors
    /// The device cannot log.
    ///
    /// [D26]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d26
    fn set_log(&mut self, log: Option<Arc<DirtyLog>>) -> Result<(), HandlerError> {
        match log {
            Some(_) => Err(HandlerError::new("the device cannot log its writes")),
            None => Ok(()),
        }
    }

    /// A running ring's [`RingAddresses::log`] changes, and nothing else about it.
    ///
    /// # Errors
    /// The device cannot log.
    fn log_ring(&mut self, ring: u16, log: Option<u64>) -> Result<(), HandlerError> {
        Ok(())
    }

    /// The descriptor, of any kind, with which the device signals to the front end that it has
    /// logged something; by default dropped, as front ends read the log when they need it.
    ///
    /// # Errors
    /// The device cannot use it.
    fn set_log_event(&mut self, event: PeerFd) -> Result<(), HandlerError> {
        Ok(())
    }

    /// The driver's device status, as virtio defines it (STATUS). 0 is a reset, for which
    /// [`reset`](Self::reset) is called instead.
    ///
    /// # Errors
    /// The device cannot.
    fn set_status(&mut self, status: u8) -> Result<(), HandlerError> {
        Ok(())
    }

    /// A guest with this address has arrived by migration (RARP): the device announces it.
    ///
    /// # Errors
    /// The device cannot.
    fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), HandlerError> {
        Ok(())
    }

    /// The MTU of the guest's network (NET_MTU).
    ///
    /// # Errors
    /// The device cannot.
    fn set_mtu(&mut self, mtu: u16) -> Result<(), HandlerError> {
        Ok(())
    }

    /// The last running ring has stopped. Until a ring starts again the front end sends no
    /// invalidations, so translations may be stale by then (rule [D21]).
    ///
    /// [D21]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d21
    fn suspended(&mut self) {}

    /// The connection has ended; every ring is stopped, and so is logging. The device may then be
    /// given to another [`Server`](crate::Server). It must forget what belonged to the connection:
    /// the channel, descriptors, translations.
    fn disconnected(&mut self) {}

    /// A request was refused, by the device or for its content, and the front end has been
    /// notified; the connection goes on. For logs.
    fn refused(&mut self, request: u32, why: &HandlerError) {}
}
