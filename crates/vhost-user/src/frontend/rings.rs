//! Requests about one ring.

use std::os::fd::BorrowedFd;

use super::{Frontend, FrontendError, Result};
use crate::{
    RingAddresses, WireError,
    msg::{self, Request, code},
};

impl Frontend {
    /// SET_VRING_NUM: the ring's size.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_num(&mut self, ring: u16, size: u16) -> Result<()> {
        self.send(Request::SetVringNum { ring: ring.into(), num: size.into() }, &[])
    }

    /// SET_VRING_ADDR: where the ring's areas are, in addresses of this process, or in IOVAs if
    /// ACCESS_PLATFORM was negotiated (rule D2).
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_addr(&mut self, ring: u16, addresses: &RingAddresses) -> Result<()> {
        self.send(Request::SetVringAddr { ring: ring.into(), addresses: *addresses }, &[])
    }

    /// SET_VRING_BASE: where the back end begins in the available ring.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_base(&mut self, ring: u16, base: u32) -> Result<()> {
        self.send(Request::SetVringBase { ring: ring.into(), base }, &[])
    }

    /// GET_VRING_BASE: stops the ring; returns its next available index.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn get_vring_base(&mut self, ring: u16) -> Result<u32> {
        let payload = self.request(Request::GetVringBase { ring: ring.into() })?;
        let (same, base) = msg::parse_vring_base(&payload).map_err(|error| self.fail(error))?;
        if same != u32::from(ring) {
            let (request, value) = (code::GET_VRING_BASE, same.into());
            return Err(self.fail(WireError::Value { request, field: "ring", value }));
        }
        Ok(base)
    }

    /// SET_VRING_KICK: starts the ring. `None`: the back end polls.
    ///
    /// Make event descriptors non-blocking: a careful back end does so otherwise, and as the two
    /// processes share the open file, the flag then changes for this one too.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_kick(&mut self, ring: u16, kick: Option<BorrowedFd<'_>>) -> Result<()> {
        self.tell_ring_fd(code::SET_VRING_KICK, ring, kick, |ring, fd| Request::SetVringKick {
            ring,
            fd,
        })
    }

    /// SET_VRING_CALL: the descriptor with which the back end notifies the driver. `None`: the
    /// driver polls.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_call(&mut self, ring: u16, call: Option<BorrowedFd<'_>>) -> Result<()> {
        self.tell_ring_fd(code::SET_VRING_CALL, ring, call, |ring, fd| Request::SetVringCall {
            ring,
            fd,
        })
    }

    /// SET_VRING_ERR: the descriptor with which the back end signals that the ring is broken.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_err(&mut self, ring: u16, err: Option<BorrowedFd<'_>>) -> Result<()> {
        self.tell_ring_fd(code::SET_VRING_ERR, ring, err, |ring, fd| Request::SetVringErr {
            ring,
            fd,
        })
    }

    /// SET_VRING_ENABLE. Only with [`F_PROTOCOL_FEATURES`](crate::F_PROTOCOL_FEATURES); without
    /// it, rings are enabled from the start.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_vring_enable(&mut self, ring: u16, enabled: bool) -> Result<()> {
        if self.features & msg::F_PROTOCOL_FEATURES == 0 {
            let (request, feature) = (code::SET_VRING_ENABLE, "PROTOCOL_FEATURES");
            return Err(FrontendError::NotNegotiated { request, feature });
        }
        self.send(Request::SetVringEnable { ring: ring.into(), enabled }, &[])
    }

    fn tell_ring_fd(
        &mut self,
        request: u32,
        ring: u16,
        fd: Option<BorrowedFd<'_>>,
        make: fn(u8, bool) -> Request,
    ) -> Result<()> {
        let why = "only rings 0 to 255 can be given a descriptor";
        let ring = u8::try_from(ring).map_err(|_| FrontendError::Argument { request, why })?;
        self.send(make(ring, fd.is_some()), fd.as_slice())
    }
}
