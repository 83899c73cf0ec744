//! `channels INTERFACE [N]`: how many pairs of queues a network interface uses, once that is N:
//! what `ethtool --set-channels` does, for which a guest has no program.

use std::{
    env,
    net::UdpSocket,
    os::fd::{AsFd, AsRawFd},
};

use anyhow::{Context, Result, ensure};

/// As `include/uapi/linux/sockios.h` and `ethtool.h` have them.
const SIOCETHTOOL: u64 = 0x8946;
const GET_CHANNELS: u32 = 0x3c;
const SET_CHANNELS: u32 = 0x3d;

/// The kernel's `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    cmd: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

/// The kernel's `struct ifreq`, of which this is the part that counts here; the rest is room.
#[repr(C)]
struct Request {
    name: [u8; 16],
    data: *mut Channels,
    room: [u64; 2],
}

fn channels(socket: impl AsFd, interface: &str, channels: &mut Channels) -> Result<()> {
    let mut request = Request { name: [0; 16], data: channels, room: [0; 2] };
    ensure!(interface.len() < request.name.len(), "{interface}: too long a name");
    request.name[..interface.len()].copy_from_slice(interface.as_bytes());
    // SAFETY: the request's own structures; both outlive the call, and the kernel writes no more
    // than the second, whose `cmd` says what it is.
    let result =
        unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
    ensure!(result == 0, "{interface}: {}", std::io::Error::last_os_error());
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let interface = arguments.next().context("the interface is missing")?;
    // Any socket will do.
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let mut now = Channels { cmd: GET_CHANNELS, ..Channels::default() };
    channels(&socket, &interface, &mut now)?;
    if let Some(wanted) = arguments.next() {
        let mut change = Channels { cmd: SET_CHANNELS, combined: wanted.parse()?, ..now };
        channels(&socket, &interface, &mut change)?;
        now = Channels { cmd: GET_CHANNELS, ..Channels::default() };
        channels(&socket, &interface, &mut now)?;
    }
    println!("{}", now.combined);
    Ok(())
}
