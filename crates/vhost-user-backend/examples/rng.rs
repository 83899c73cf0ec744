//! A source of random bytes for a virtual machine, with a device IOTLB:
//! `cargo run -p ringfence-vhost-user-backend --example rng /tmp/rng.sock`, and QEMU with
//! `-chardev socket,id=c,path=/tmp/rng.sock -device vhost-user-rng-pci,chardev=c`.

use std::{error::Error, fs::File, io::Read, os::unix::net::UnixListener, sync::Arc};

use ringfence_iotlb::IotlbConfig;
use ringfence_run::worker::{Notify, Worker};
use ringfence_vhost_user::Server;
use ringfence_vhost_user_backend::{Addresses, Device, Request, Requests};

struct Rng(File);

impl Device for Rng {
    fn request(&mut self, _queue: u16, mut request: Request) {
        let mut bytes = [0; 4096];
        let len = request.writable_len().min(bytes.len());
        match self.0.read_exact(&mut bytes[..len]) {
            Ok(()) => _ = request.write(&bytes[..len]),
            Err(error) => request.fail(error),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(socket) = std::env::args().nth(1) else {
        println!("usage: rng SOCKET");
        return Ok(());
    };
    let workers: Arc<[Worker]> = [Worker::spawn("rng", Notify::Adaptive)?].into();
    let listener = UnixListener::bind(&socket)?;
    println!("listening on {socket}");
    for front_end in listener.incoming() {
        let device = Rng(File::open("/dev/urandom")?);
        let addresses = Addresses::Iotlb(IotlbConfig::default());
        let backend = Requests::backend(device, "rng", addresses, Arc::clone(&workers), 0);
        if let Err(error) = Server::new(front_end?, backend).serve() {
            eprintln!("the connection has ended: {error}");
        }
    }
    Ok(())
}
