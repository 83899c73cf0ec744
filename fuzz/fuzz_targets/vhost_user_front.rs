//! Arbitrary bytes from a back end, on both sockets, to a front end.
//!
//! The first byte says how many of the rest come on the back end's channel; the others are replies.

#![no_main]

mod threads;

use std::{io::Write, os::unix::net::UnixStream, time::Duration};

use libfuzzer_sys::fuzz_target;
use ringfence_mem::GuestRam;
use ringfence_vhost_user::{Frontend, FrontendChannel, FrontendError, Iotlb, ProtocolFeatures};

fuzz_target!(|data: &[u8]| threads::await_end(|| run(data)));

fn run(data: &[u8]) {
    let Some((&cut, rest)) = data.split_first() else { return };
    let rest = &rest[..rest.len().min(8192)];
    let (channel, replies) = rest.split_at(usize::from(cut).min(rest.len()));

    let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
    theirs.write_all(channel).expect("it is connected");
    drop(theirs);
    let mut ours = FrontendChannel::new(ours, Duration::from_secs(10));
    let mut messages = Vec::new();
    while let Ok(true) = ours.recv_all(None, &mut messages) {}
    assert!(messages.len() <= channel.len() / 12);

    let (ours, mut theirs) = UnixStream::pair().expect("a socket pair");
    theirs.write_all(replies).expect("it is connected");
    theirs.shutdown(std::net::Shutdown::Write).expect("it is connected");
    let ram = GuestRam::new(1 << 14, 0).expect("a memory file");
    let mut front = Frontend::new(ours, Duration::from_secs(10));
    let mut requests = || -> Result<(), FrontendError> {
        front.negotiate(!0, ProtocolFeatures::KNOWN)?;
        front.set_mem_table(&[(ram.region(), ram.fd())])?;
        let _ = front.inflight(1, 64)?;
        front.config(0, &mut [0; 60])?;
        front.iotlb(&Iotlb::Invalidate { first: 0, last: u64::MAX })?;
        front.get_vring_base(0)?;
        front.status()?;
        Ok(())
    };
    let result = requests();
    // All that will come is there already: nothing is waited for.
    if let Err(error) = &result {
        assert!(!error.to_string().contains("within"), "{error}");
    }
    if let Err(FrontendError::Wire(_)) = result {
        assert!(matches!(front.features(), Err(FrontendError::Closed)));
    }
}
