//! A vhost-user back end with a device IOTLB, a source of random bytes:
//! `cargo run -p ringfence --features backend --example rng /tmp/rng.sock`, and QEMU (its IOMMU and
//! shared memory as in the README) with `-chardev socket,id=c,path=/tmp/rng.sock
//! -device vhost-user-rng-pci,chardev=c,bus=rp1,disable-legacy=on,iommu_platform=on,ats=on`
use std::{fs::File, io, io::Read, os::unix::net::UnixListener};

use ringfence::backend::{self, Device, IotlbConfig, Request};

struct Rng(File);

impl Device for Rng {
    /// Its buffers are translated and checked; a miss has parked the request, not the worker.
    fn request(&mut self, _queue: u16, mut request: Request) {
        let mut bytes = [0; 4096];
        let len = request.writable_len().min(bytes.len());
        match self.0.read_exact(&mut bytes[..len]) {
            Ok(()) => _ = request.write(&bytes[..len]), // and completes it
            Err(error) => request.fail(error),
        }
    }
}

fn main() -> io::Result<()> {
    let Some(socket) = std::env::args().nth(1) else {
        println!("usage: rng SOCKET");
        return Ok(());
    };
    let listener = UnixListener::bind(socket)?;
    let device = || Ok(Rng(File::open("/dev/urandom")?));
    backend::serve("rng", &listener, IotlbConfig::default(), device)
}
