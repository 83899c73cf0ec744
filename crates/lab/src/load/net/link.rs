//! The sockets: negotiation, rings, and the updates for misses.

use std::{
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use ringfence_vhost_user::{
    BackendMessage, BackendRequest, Frontend, FrontendChannel, Iotlb, ProtocolFeatures,
    RingAddresses,
};
use ringfence_virtq::{F_ACCESS_PLATFORM, F_RING_PACKED, F_VERSION_1, device, driver::QueueConfig};

use super::{Entry, names, pipe::Pipe, space::Space};

/// The time-out for any reply of a back end.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The front end of a device, the channel on which the device sends misses, and the memory that
/// both share.
#[derive(Debug)]
pub(crate) struct Link {
    front: Frontend,
    pub(crate) pipe: Pipe,
    channel: Option<FrontendChannel>,
    /// What came on the channel at once.
    requests: Vec<BackendRequest>,
    pub(crate) space: Space,
}

impl Link {
    /// Negotiates the features in `own` and those that addresses and rings need, and shares the
    /// memory.
    pub(crate) fn open(stream: UnixStream, own: u64, packed: bool, space: Space) -> Result<Link> {
        let mut front = Frontend::new(stream, TIMEOUT);
        let protocol = ProtocolFeatures::MQ | ProtocolFeatures::BACKEND_REQ;
        let mut needed = F_VERSION_1 | own;
        if space.addressing.translated() {
            needed |= F_ACCESS_PLATFORM;
        }
        if packed {
            needed |= F_RING_PACKED;
        }
        let settled = front.negotiate(needed, protocol)?;
        if settled & needed != needed {
            bail!("the back end does not offer {}", names(needed & !settled));
        }
        let mut channel = None;
        if space.addressing.translated() {
            let (ours, theirs) = FrontendChannel::pair(TIMEOUT)?;
            front.set_backend_channel(theirs.as_fd())?;
            channel = Some(ours);
        }
        front.set_mem_table(&[(space.ram.region(), space.ram.fd())])?;
        let pipe = Pipe::new(front.iotlb_handle());
        Ok(Link { front, pipe, channel, requests: Vec::new(), space })
    }

    /// Starts a ring whose areas lie from the offset `at` on; they are mapped first, as QEMU does it.
    pub(crate) fn start_ring(
        &mut self,
        ring: u16,
        config: QueueConfig,
        at: usize,
        kick: BorrowedFd<'_>,
        call: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        self.front.set_vring_num(ring, config.size)?;
        self.front.set_vring_base(ring, device::RingConfig::start(config.packed))?;
        let (space, offsets) = (&self.space, config.offsets());
        let translated = space.addressing.translated();
        // Rule D2: addresses of this process, where none are translated.
        let [desc, avail, used] = [offsets.desc, offsets.avail, offsets.used].map(|area| {
            let offset = (at + area) as u64;
            if translated { space.device_addr(offset) } else { space.ram.user_addr() + offset }
        });
        self.front.set_vring_addr(ring, &RingAddresses { desc, avail, used, log: None })?;
        self.front.set_vring_call(ring, call)?;
        self.front.set_vring_kick(ring, Some(kick))?;
        if translated {
            for addr in [desc, avail, used] {
                self.pipe.update(self.space.mapped(addr)?);
            }
            self.pipe.settle()?;
        }
        self.front.set_vring_enable(ring, true)?;
        Ok(())
    }

    /// Stops a ring.
    pub(crate) fn stop_ring(&mut self, ring: u16) -> Result<()> {
        self.pipe.settle()?;
        self.front.set_vring_enable(ring, false)?;
        self.front.get_vring_base(ring)?;
        Ok(())
    }

    /// Sends each lasting translation of the first buffers once, in the order of addresses.
    pub(crate) fn prefill(&mut self, buffers: u32) -> Result<()> {
        let space = &self.space;
        let entry = |buffer| space.entry(space.device_addr(space.buffer(buffer)));
        let mut entries: Vec<Entry> = (0..buffers).filter_map(entry).collect();
        entries.sort_unstable_by_key(|entry| entry.first);
        entries.dedup();
        for some in entries.chunks(64) {
            some.iter().for_each(|entry| _ = self.pipe.update(*entry));
            self.pipe.settle()?;
        }
        Ok(())
    }

    /// Sends what was put into the pipe and takes the replies; then sends updates for the misses
    /// that have come meanwhile, and returns how many these were. A miss at an unmapped address
    /// gets no UPDATE (rule D8).
    pub(crate) fn serve_misses(&mut self) -> Result<u64> {
        let Link { pipe, channel, requests, space, .. } = self;
        let Some(channel) = channel else { return Ok(0) };
        let before = pipe.messages.misses;
        pipe.flush()?;
        requests.clear();
        let open = channel.recv_all(Some(Duration::ZERO), requests)?;
        ensure!(open, "the back end has hung up its channel");
        for request in requests {
            let done = match request.message {
                BackendMessage::Iotlb(Iotlb::Miss { iova, .. }) => {
                    pipe.messages.misses += 1;
                    space.entry(iova).map(|entry| pipe.update(entry)).is_some()
                }
                BackendMessage::Iotlb(_) => true,
                other => bail!("{other:?} on the back end's channel is no IOTLB message"),
            };
            if request.need_reply {
                // Rule D9: the UPDATE first.
                pipe.flush()?;
                channel.reply(request, done)?;
            }
        }
        pipe.flush()?;
        Ok(pipe.messages.misses - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::net::{Addressing, pipe::update};
    use ringfence_mem::Access;
    use ringfence_vhost_user::{
        IotlbWire,
        msg::{Header, code::BACKEND_IOTLB_MSG},
    };
    use std::io::{Read, Write};
    use zerocopy::{FromBytes, IntoBytes};

    /// Bytes of a message about an IOTLB.
    const MESSAGE: usize = Header::LEN + size_of::<IotlbWire>();

    /// A link between the ends of two sockets, over which a memory was announced, and their other
    /// ends.
    fn link(space: Space) -> (Link, UnixStream, UnixStream) {
        let (ours, mut main) = UnixStream::pair().unwrap();
        let (channel, theirs) = UnixStream::pair().unwrap();
        let mut front = Frontend::new(ours, TIMEOUT);
        front.set_features(ringfence_virtq::F_ACCESS_PLATFORM).unwrap();
        front.set_mem_table(&[(space.ram.region(), space.ram.fd())]).unwrap();
        while !read(&mut main).is_empty() {}
        let pipe = Pipe::new(front.iotlb_handle());
        let channel = Some(FrontendChannel::new(channel, TIMEOUT));
        (Link { front, pipe, channel, requests: Vec::new(), space }, main, theirs)
    }

    fn miss(iova: u64, ack: bool) -> Vec<u8> {
        let wire = Iotlb::Miss { iova, access: Access::Read }.emit().unwrap();
        let header = Header::request(BACKEND_IOTLB_MSG, ack, size_of_val(&wire));
        [header.as_bytes(), wire.as_bytes()].concat()
    }

    fn space() -> Space {
        Space::new(Addressing::Static { entry: 4096, mergeable: false }, 64, false).unwrap()
    }

    /// All that is there.
    fn read(stream: &mut UnixStream) -> Vec<u8> {
        stream.set_nonblocking(true).unwrap();
        let mut bytes = vec![0; 4096];
        let len = stream.read(&mut bytes).unwrap_or(0);
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn a_miss_is_served_by_its_entry_and_one_that_leads_nowhere_by_none() {
        // rules D8, D9
        let (mut link, mut main, mut channel) = link(space());
        let known = link.space.device_addr(link.space.buffer(7)) + 9;
        let messages = [miss(known, false), miss(5, false), miss(known, true), miss(5, true)];
        channel.write_all(&messages.concat()).unwrap();
        assert_eq!(link.serve_misses().unwrap(), 4);

        let updates = read(&mut main);
        let (updates, rest) = updates.as_chunks::<MESSAGE>();
        assert_eq!((updates.len(), rest.len()), (2, 0), "for those that lead somewhere");
        for message in updates {
            let wire = IotlbWire::read_from_bytes(&message[Header::LEN..]).unwrap();
            assert_eq!(wire.parse(), Ok(update(link.space.entry(known).unwrap())));
        }
        let replies = read(&mut channel);
        let done = [0_u64, 1].map(|value| {
            [Header::reply(BACKEND_IOTLB_MSG, 8).as_bytes(), &value.to_ne_bytes()].concat()
        });
        assert_eq!(replies, done.concat(), "to those that wanted one, in order");
        assert_eq!((link.pipe.messages.misses, link.pipe.messages.updates), (4, 2));
    }

    #[test]
    fn nonsense_on_the_channel_is_an_error() {
        let mut wrong = [miss(5, false), miss(5, false), miss(5, false)];
        wrong[0][0] = 2;
        wrong[1][8] = 31;
        // The type: no message has it.
        wrong[2][Header::LEN + 25] = 9;
        for bytes in wrong {
            let (mut link, _main, mut channel) = link(space());
            channel.write_all(&bytes).unwrap();
            assert!(link.serve_misses().is_err());
        }
        let (mut link, _main, channel) = link(space());
        drop(channel);
        assert!(link.serve_misses().is_err(), "and so is its end");
    }

    #[test]
    fn a_ticket_is_that_of_its_own_message() {
        let (mut link, mut main, _channel) = link(space());
        let entry = link.space.mapped(link.space.device_addr(0)).unwrap();
        let tickets = [link.pipe.invalidate(0, 4095), link.pipe.update(entry)];
        link.serve_misses().unwrap();
        assert_eq!(read(&mut main).len(), 2 * MESSAGE, "in one piece");
        for ticket in tickets {
            assert!(!link.pipe.is_done(ticket));
            let header = Header::reply(ringfence_vhost_user::msg::code::IOTLB_MSG, 8);
            main.write_all(&[header.as_bytes(), &[0; 8]].concat()).unwrap();
            link.serve_misses().unwrap();
            assert!(link.pipe.is_done(ticket));
        }
    }
}
