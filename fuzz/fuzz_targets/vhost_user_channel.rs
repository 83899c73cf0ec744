//! Arbitrary replies on the back end's channel, to a back end that has sent misses.
//!
//! The first byte is the number of misses that await a reply; the rest is what comes back.

#![no_main]

mod threads;

use std::{
    io::Write,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::Arc,
    thread,
    time::Duration,
};

use libfuzzer_sys::fuzz_target;
use ringfence_mem::{Access, GuestRam, Memory};
use ringfence_run::PeerFd;
use ringfence_vhost_user::{
    BackendChannel, F_ACCESS_PLATFORM, Frontend, Handler, HandlerError, Iotlb, Offer,
    ProtocolFeatures, RingAddresses, RingSetup, Server,
};

/// A device that sends misses when its ring starts.
struct Device {
    misses: u64,
    replies: u64,
    channel: Option<Arc<BackendChannel>>,
}

impl Handler for Device {
    fn offer(&self) -> Offer {
        Offer { protocol: ProtocolFeatures::KNOWN, ..Offer::new(F_ACCESS_PLATFORM | 1 << 32, 1) }
    }
    fn set_features(&mut self, _: u64) -> Result<(), HandlerError> {
        Ok(())
    }
    fn set_memory(&mut self, _: Arc<Memory>) -> Result<(), HandlerError> {
        Ok(())
    }
    fn start_ring(&mut self, _: u16, _: RingSetup) -> Result<(), HandlerError> {
        let miss = |page| (Iotlb::Miss { iova: page << 12, access: Access::Read }, Some(page));
        let channel = self.channel.as_ref().expect("it was given first");
        assert_eq!(channel.try_send((0..self.misses).map(miss)) as u64, self.misses);
        Ok(())
    }
    fn stop_ring(&mut self, _: u16) -> Result<u32, HandlerError> {
        Ok(0)
    }
    fn enable_ring(&mut self, _: u16, _: bool) -> Result<(), HandlerError> {
        Ok(())
    }
    fn set_call(&mut self, _: u16, _: Option<PeerFd>) -> Result<(), HandlerError> {
        Ok(())
    }
    fn set_backend_channel(&mut self, channel: Arc<BackendChannel>) -> Result<(), HandlerError> {
        self.channel = Some(channel);
        Ok(())
    }
    fn channel_reply(&mut self, message: Iotlb, number: u64, _: bool) {
        // In the order of the misses, and none twice.
        let access = Access::Read;
        assert_eq!(message, Iotlb::Miss { iova: self.replies << 12, access });
        assert_eq!(number, self.replies);
        self.replies += 1;
        assert!(self.replies <= self.misses);
    }
}

fuzz_target!(|data: &[u8]| threads::await_end(|| run(data)));

fn run(data: &[u8]) {
    let Some((&misses, bytes)) = data.split_first() else { return };
    let (front, back) = UnixStream::pair().expect("a socket pair");
    let (mut ours, theirs) = UnixStream::pair().expect("a socket pair");
    let ram = GuestRam::new(1 << 14, 0).expect("a memory file");
    let served = thread::spawn(move || {
        let device = Device { misses: u64::from(misses) % 70, replies: 0, channel: None };
        let mut server = Server::new(back, device);
        // The rest of a truncated message never comes.
        server.set_timeout(Duration::from_millis(20));
        let _ = server.serve();
    });
    let mut front = Frontend::new(front, Duration::from_secs(10));
    let all = ProtocolFeatures::KNOWN;
    front.negotiate(!0, all).expect("nothing is wrong yet");
    front.set_backend_channel(theirs.as_fd()).expect("nothing is wrong yet");
    front.set_mem_table(&[(ram.region(), ram.fd())]).expect("nothing is wrong yet");
    front.set_vring_num(0, 64).expect("nothing is wrong yet");
    front.set_vring_addr(0, &RingAddresses::default()).expect("nothing is wrong yet");
    front.set_vring_kick(0, None).expect("nothing is wrong yet");
    let _ = ours.write_all(&bytes[..bytes.len().min(4096)]);
    // A reply, or a closed connection: a time-out would be a hang.
    if let Err(error) = front.queue_num() {
        assert!(!error.to_string().contains("within"), "{error}");
    }
    drop(front);
    served.join().expect("the back end lives");
}
