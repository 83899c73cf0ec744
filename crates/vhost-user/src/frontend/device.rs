//! Requests about the whole device.

use ringfence_run::PeerFd;
use std::os::fd::BorrowedFd;

use super::{Frontend, FrontendError, Result};
use crate::{
    ProtocolFeatures, WireError,
    msg::{self, ConfigWrite, Inflight, Request, code},
};

impl Frontend {
    /// GET_CONFIG: fills `out` (1 to 256 bytes) from the configuration space. Needs CONFIG.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<()> {
        let request = code::GET_CONFIG;
        self.need(request, ProtocolFeatures::CONFIG, "CONFIG")?;
        let size = config_size(request, offset, out)?;
        let payload = self.request(Request::GetConfig { offset, size })?;
        if payload.is_empty() {
            return Err(FrontendError::Refused { request, code: 1 });
        }
        match Request::parse(request, &payload) {
            Ok(Request::GetConfig { offset: at, size: bytes }) if (at, bytes) == (offset, size) => {
                out.copy_from_slice(&payload[msg::CONFIG_HEAD..]);
                Ok(())
            }
            Ok(_) => Err(self.fail(WireError::Size { request, size: payload.len() as u32 })),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// SET_CONFIG, on behalf of the driver: 1 to 256 bytes. Needs CONFIG.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_config(&mut self, offset: u32, data: &[u8]) -> Result<()> {
        self.need(code::SET_CONFIG, ProtocolFeatures::CONFIG, "CONFIG")?;
        config_size(code::SET_CONFIG, offset, data)?;
        let (why, data) = (ConfigWrite::Driver, data.to_vec());
        self.send(Request::SetConfig { offset, why, data }, &[])
    }

    /// RESET_DEVICE: stops and disables all rings, unsets the features. Needs RESET_DEVICE.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn reset_device(&mut self) -> Result<()> {
        self.need(code::RESET_DEVICE, ProtocolFeatures::RESET_DEVICE, "RESET_DEVICE")?;
        self.send(Request::ResetDevice, &[])
    }

    /// SET_STATUS: the driver's device status; 0 resets the device. Needs STATUS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_status(&mut self, status: u8) -> Result<()> {
        self.need(code::SET_STATUS, ProtocolFeatures::STATUS, "STATUS")?;
        self.send(Request::SetStatus(status), &[])
    }

    /// GET_STATUS. Needs STATUS.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn status(&mut self) -> Result<u8> {
        let request = code::GET_STATUS;
        self.need(request, ProtocolFeatures::STATUS, "STATUS")?;
        let value = self.request_word(Request::GetStatus, &[])?;
        let field = "status";
        u8::try_from(value).map_err(|_| self.fail(WireError::Value { request, field, value }))
    }

    /// GET_INFLIGHT_FD: has the back end allocate an in-flight region for so many queues of so many
    /// descriptors; `None` if it cannot. Keep the file as long as the rings. Needs INFLIGHT_SHMFD,
    /// and comes after SET_FEATURES, which determines the rings' format.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn inflight(&mut self, queues: u16, size: u16) -> Result<Option<(Inflight, PeerFd)>> {
        let request = code::GET_INFLIGHT_FD;
        self.need(request, ProtocolFeatures::INFLIGHT_SHMFD, "INFLIGHT_SHMFD")?;
        let wanted = Inflight { queues, size, ..Inflight::default() };
        let mut message = self.exchange(&Request::GetInflight(wanted), false, &[])?;
        let place = msg::parse_inflight(&message.payload).map_err(|error| self.fail(error))?;
        match (message.fds.pop(), place.len, message.fds.len()) {
            (Some(fd), 1.., 0) => Ok(Some((place, fd))),
            (None, 0, 0) => Ok(None),
            (fd, ..) => {
                let count = message.fds.len() + usize::from(fd.is_some());
                Err(self.fail(WireError::Fds { request, count }))
            }
        }
    }

    /// SET_INFLIGHT_FD: hands the region to the back end, or to its successor. Before the rings
    /// start.
    /// Needs INFLIGHT_SHMFD.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_inflight(&mut self, place: &Inflight, file: BorrowedFd<'_>) -> Result<()> {
        let request = code::SET_INFLIGHT_FD;
        self.need(request, ProtocolFeatures::INFLIGHT_SHMFD, "INFLIGHT_SHMFD")?;
        self.send(Request::SetInflight(*place), &[file])
    }

    /// SET_LOG_BASE: `len` bytes of the file, from `offset` (a multiple of the page size), are the
    /// dirty log from now on: one bit for 4096 bytes of guest-physical memory. Writes are logged
    /// while F_LOG_ALL is among the features. Needs LOG_SHMFD.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_log_base(&mut self, file: BorrowedFd<'_>, offset: u64, len: u64) -> Result<()> {
        let request = code::SET_LOG_BASE;
        self.need(request, ProtocolFeatures::LOG_SHMFD, "LOG_SHMFD")?;
        match self.request_word(Request::SetLogBase { len, offset }, &[file])? {
            0 => Ok(()),
            code => Err(FrontendError::Refused { request, code }),
        }
    }

    /// SET_LOG_FD: the descriptor with which the back end may signal that it has logged something.
    /// Needs LOG_SHMFD.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_log_event(&mut self, event: BorrowedFd<'_>) -> Result<()> {
        self.need(code::SET_LOG_FD, ProtocolFeatures::LOG_SHMFD, "LOG_SHMFD")?;
        self.send(Request::SetLogFd, &[event])
    }

    /// SEND_RARP: a guest with this address is here now. Needs RARP.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn send_rarp(&mut self, mac: [u8; 6]) -> Result<()> {
        self.need(code::SEND_RARP, ProtocolFeatures::RARP, "RARP")?;
        self.send(Request::SendRarp(mac), &[])
    }

    /// NET_SET_MTU. Needs NET_MTU.
    ///
    /// # Errors
    /// See [`FrontendError`].
    pub fn set_mtu(&mut self, mtu: u16) -> Result<()> {
        self.need(code::NET_SET_MTU, ProtocolFeatures::NET_MTU, "NET_MTU")?;
        self.send(Request::NetSetMtu(mtu), &[])
    }
}

fn config_size(request: u32, offset: u32, data: &[u8]) -> Result<u32> {
    let why = "1 to 256 bytes of configuration space, within 2^32";
    if data.is_empty() || data.len() > msg::MAX_CONFIG {
        return Err(FrontendError::Argument { request, why });
    }
    let size = data.len() as u32;
    offset.checked_add(size).ok_or(FrontendError::Argument { request, why }).map(|_| size)
}
