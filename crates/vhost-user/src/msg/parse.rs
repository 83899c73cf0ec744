//! Reading the front end's requests.

use super::{
    ConfigWrite, ProtocolFeatures, Request, RingAddresses, code,
    payload::Payload,
    wire::{AddrWire, InflightWire, LogWire, StateWire, VRING_F_LOG},
};
use crate::WireError;

impl Request {
    /// Reads a request.
    ///
    /// # Errors
    /// An unknown number, a payload of the wrong size, or a field with an impossible value.
    pub fn parse(request: u32, payload: &[u8]) -> Result<Request, WireError> {
        let wire = Payload { request, payload };
        Ok(match request {
            code::GET_FEATURES => wire.empty(Request::GetFeatures)?,
            code::SET_FEATURES => Request::SetFeatures(wire.read()?),
            code::SET_OWNER => wire.empty(Request::SetOwner)?,
            code::RESET_OWNER => wire.empty(Request::ResetOwner)?,
            code::SET_MEM_TABLE => Request::SetMemTable(wire.regions()?),
            code::SET_VRING_NUM => {
                let StateWire { ring, num } = wire.read()?;
                Request::SetVringNum { ring, num }
            }
            code::SET_VRING_ADDR => {
                let AddrWire { ring, flags, desc, used, avail, log } = wire.read()?;
                if flags & !VRING_F_LOG != 0 {
                    return Err(wire.value("flags", flags.into()));
                }
                let log = (flags & VRING_F_LOG != 0).then_some(log);
                let addresses = RingAddresses { desc, avail, used, log };
                Request::SetVringAddr { ring, addresses }
            }
            code::SET_VRING_BASE => {
                let StateWire { ring, num } = wire.read()?;
                Request::SetVringBase { ring, base: num }
            }
            // The other half of the request means nothing.
            code::GET_VRING_BASE => Request::GetVringBase { ring: wire.read::<StateWire>()?.ring },
            code::SET_VRING_KICK => {
                let (ring, fd) = wire.ring_fd()?;
                Request::SetVringKick { ring, fd }
            }
            code::SET_VRING_CALL => {
                let (ring, fd) = wire.ring_fd()?;
                Request::SetVringCall { ring, fd }
            }
            code::SET_VRING_ERR => {
                let (ring, fd) = wire.ring_fd()?;
                Request::SetVringErr { ring, fd }
            }
            code::GET_PROTOCOL_FEATURES => wire.empty(Request::GetProtocolFeatures)?,
            code::SET_PROTOCOL_FEATURES => {
                Request::SetProtocolFeatures(ProtocolFeatures::from_bits_retain(wire.read()?))
            }
            code::GET_QUEUE_NUM => wire.empty(Request::GetQueueNum)?,
            code::SET_VRING_ENABLE => {
                let StateWire { ring, num } = wire.read()?;
                if num > 1 {
                    return Err(wire.value("enable", num.into()));
                }
                Request::SetVringEnable { ring, enabled: num == 1 }
            }
            code::SET_BACKEND_REQ_FD => wire.empty(Request::SetBackendReqFd)?,
            code::IOTLB_MSG => Request::Iotlb(wire.read()?),
            code::GET_CONFIG => {
                let (head, data) = wire.config()?;
                // The flags of a read mean nothing.
                Request::GetConfig { offset: head.offset, size: data.len() as u32 }
            }
            code::SET_CONFIG => {
                let (head, data) = wire.config()?;
                let why = match head.flags {
                    0 => ConfigWrite::Driver,
                    1 => ConfigWrite::Migration,
                    other => return Err(wire.value("flags", other.into())),
                };
                Request::SetConfig { offset: head.offset, why, data: data.to_vec() }
            }
            code::SET_LOG_BASE => {
                let LogWire { len, offset } = wire.read()?;
                Request::SetLogBase { len, offset }
            }
            // Some senders add a word that means nothing.
            code::SET_LOG_FD if payload.len() == 8 => Request::SetLogFd,
            code::SET_LOG_FD => wire.empty(Request::SetLogFd)?,
            code::SEND_RARP => {
                let [a, b, c, d, e, f, _, _] = wire.read()?;
                Request::SendRarp([a, b, c, d, e, f])
            }
            code::NET_SET_MTU => Request::NetSetMtu(wire.narrow("MTU")?),
            code::GET_INFLIGHT_FD => Request::GetInflight(wire.read::<InflightWire>()?.into()),
            code::SET_INFLIGHT_FD => Request::SetInflight(wire.read::<InflightWire>()?.into()),
            code::SET_STATUS => Request::SetStatus(wire.narrow("status")?),
            code::GET_STATUS => wire.empty(Request::GetStatus)?,
            code::POSTCOPY_ADVISE | code::POSTCOPY_LISTEN | code::POSTCOPY_END => {
                return Err(WireError::State {
                    request,
                    why: "postcopy migration is not supported",
                });
            }
            code::RESET_DEVICE => wire.empty(Request::ResetDevice)?,
            code::GET_MAX_MEM_SLOTS => wire.empty(Request::GetMaxMemSlots)?,
            code::ADD_MEM_REG => Request::AddMemReg(wire.slot()?),
            code::REM_MEM_REG => Request::RemMemReg(wire.slot()?),
            _ => return Err(WireError::Request { request }),
        })
    }
}
