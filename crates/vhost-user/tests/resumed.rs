//! A connection that another server takes over.

mod common;

use common::{Device, Event, LONG, Served, VERSION_1, end};
use ringfence_mem::{Access, GuestRam, Region};
use ringfence_run::PeerFd;
use ringfence_vhost_user::{
    BackendRequest, ConnectionState, F_ACCESS_PLATFORM, Frontend, FrontendChannel, Iotlb, Keeper,
    ProtocolFeatures, RingAddresses, SavedConnection, ServeError, Server, Shutdown, msg::Request,
};
use rustix::event::{EventfdFlags, eventfd};
use std::{
    io::Write,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// The state that was kept last.
#[derive(Default)]
struct Last {
    kept: Option<(Vec<u8>, Vec<OwnedFd>)>,
    /// Whether requests are in progress.
    unsettled: bool,
}

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Last>>);

impl Keeper for Notes {
    fn unsettled(&mut self) {
        self.0.lock().unwrap().unsettled = true;
    }
    fn settled(&mut self) {
        self.0.lock().unwrap().unsettled = false;
    }
    fn keep(&mut self, state: Option<&ConnectionState<'_>>) {
        // A front end that got its reply before this would see the state of before.
        thread::sleep(Duration::from_millis(1));
        let mut notes = self.0.lock().unwrap();
        notes.kept = state.map(|state| {
            let (bytes, fds) = state.emit();
            let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            (bytes, fds)
        });
    }
}

impl Notes {
    fn saved(&self) -> SavedConnection {
        let notes = self.0.lock().unwrap();
        let (bytes, fds) = notes.kept.as_ref().unwrap();
        let fds = fds.iter().map(|fd| PeerFd::from(fd.try_clone().unwrap())).collect();
        SavedConnection::parse(bytes, fds).unwrap()
    }

    /// Waits until all requests that were sent are carried out and have their replies.
    fn await_settled(&self) {
        until(|| !self.0.lock().unwrap().unsettled);
    }
}

/// A server of a connection, from its beginning or from its kept state.
fn served(
    stream: UnixStream,
    device: Device,
    saved: Option<SavedConnection>,
) -> (Notes, Shutdown, Served) {
    let mut server = Server::new(end(stream), device);
    let notes = Notes::default();
    server.set_keeper(Box::new(notes.clone())).unwrap();
    saved.into_iter().for_each(|saved| server.resume(saved));
    let handle = server.shutdown_handle();
    let served = thread::spawn(move || {
        let result = server.serve();
        (result, server.into_handler())
    });
    (notes, handle, served)
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

const ADDRESSES: RingAddresses =
    RingAddresses { desc: 0x1000, avail: 0x2000, used: 0x3000, log: None };

/// A front end that has started ring 0 of a device, and set up ring 1.
fn begun(stream: UnixStream) -> Frontend {
    let mut front = Frontend::new(end(stream), LONG);
    front.negotiate(VERSION_1, ProtocolFeatures::KNOWN).unwrap();
    for at in 0..2 {
        let ram = GuestRam::new(1 << 20, at << 20).unwrap();
        let region = Region { user_addr: at << 20, ..ram.region() };
        front.request(Request::AddMemReg(region), &[ram.fd()]).unwrap();
    }
    for ring in 0..2 {
        front.set_vring_num(ring, 256).unwrap();
        front.set_vring_addr(ring, &ADDRESSES).unwrap();
        front.set_vring_base(ring, 7 + u32::from(ring)).unwrap();
        front.set_vring_call(ring, Some(event().as_fd())).unwrap();
    }
    front.set_vring_enable(0, true).unwrap();
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    front
}

/// The calls that a device gets when it resumes with ring 0 at `base`.
fn restored_calls(base: Option<u32>) -> Vec<Event> {
    let start = Event::Start { ring: 0, size: 256, base, kick: true, enabled: true, desc: 0x1000 };
    let memories = [Event::Memory(1), Event::Memory(2)];
    [Event::Features(VERSION_1)]
        .into_iter()
        .chain(memories)
        .chain([Event::Call(0, true), start, Event::Call(1, true)])
        .collect()
}

#[test]
fn a_state_is_kept_before_the_front_end_has_the_reply() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (notes, _, _served) = served(theirs, Device::default(), None);
    let mut front = begun(ours);
    for base in 20..30 {
        front.set_vring_base(1, base).unwrap();
        let kept = notes.0.lock().unwrap().kept.as_ref().unwrap().0.clone();
        let state = [1, base].map(u32::to_ne_bytes).concat();
        assert!(kept.windows(state.len()).any(|part| part == state), "{base}");
    }
}

#[test]
fn a_connection_that_is_left_goes_on_elsewhere_and_its_front_end_notices_nothing() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (notes, handle, first) = served(theirs.try_clone().unwrap(), Device::default(), None);
    let mut front = begun(ours);
    handle.leave();
    let (result, device) = first.join().unwrap();
    result.unwrap();
    assert_eq!(device.events.last(), Some(&Event::Stop(0)));
    assert!(!notes.0.lock().unwrap().unsettled);
    // The position at which ring 0 was stopped is known.
    let stream = theirs.try_clone().unwrap();
    let (kept, handle, second) = served(stream, Device::default(), Some(notes.saved()));
    let mut config = [0; 4];
    front.config(8, &mut config).unwrap();
    assert_eq!(config, [8, 9, 10, 11]);
    assert_eq!(front.get_vring_base(1).unwrap(), 8);
    kept.await_settled();
    // That process dies: the position of ring 0 is unknown.
    let saved = kept.saved();
    handle.leave();
    let (result, device) = second.join().unwrap();
    result.unwrap();
    let calls = device.events.len() - 1;
    assert_eq!(device.events[..calls], restored_calls(Some(77)));
    let (_, _, third) = served(theirs, Device::default(), Some(saved));
    assert_eq!(front.get_vring_base(0).unwrap(), 77);
    drop(front);
    let (result, device) = third.join().unwrap();
    result.unwrap();
    let calls = device.events.len() - 1;
    assert_eq!(device.events[..calls], restored_calls(None));
}

/// A front end whose device has started ring 0 and sends misses on the channel; returns this end of
/// the channel with both.
fn with_channel(stream: UnixStream) -> (Frontend, FrontendChannel, UnixStream) {
    let mut front = Frontend::new(end(stream), LONG);
    front.negotiate(VERSION_1 | F_ACCESS_PLATFORM, ProtocolFeatures::KNOWN).unwrap();
    let (channel, back) = UnixStream::pair().unwrap();
    front.set_backend_channel(back.as_fd()).unwrap();
    let ram = GuestRam::new(1 << 20, 0).unwrap();
    front.request(Request::AddMemReg(ram.region()), &[ram.fd()]).unwrap();
    front.set_vring_num(0, 64).unwrap();
    front.set_vring_addr(0, &ADDRESSES).unwrap();
    front.set_vring_kick(0, Some(event().as_fd())).unwrap();
    (front, FrontendChannel::new(channel, LONG), back)
}

/// Waits until `so` holds.
fn until(so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < LONG);
        thread::yield_now();
    }
}

fn with_miss(page: u64) -> Device {
    Device { miss_at: Some(page << 12), ..Device::default() }
}

#[test]
fn the_back_ends_channel_goes_on_and_each_process_gets_the_replies_to_its_own_messages() {
    // rules D9, D27
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (notes, handle, first) = served(theirs.try_clone().unwrap(), with_miss(1), None);
    let (mut front, mut channel, back) = with_channel(ours);
    handle.leave();
    first.join().unwrap().0.unwrap();
    let second = with_miss(2);
    let replied = Arc::clone(&second.replied);
    let (kept, handle, second) = served(theirs.try_clone().unwrap(), second, Some(notes.saved()));
    let mut requests = Vec::new();
    while requests.len() < 2 {
        assert!(channel.recv_all(None, &mut requests).unwrap());
    }
    // The misses of the first get their replies when the second is there.
    channel.reply(&requests[0], true).unwrap();
    channel.reply(&requests[1], false).unwrap();
    until(|| replied.load(Ordering::Relaxed) > 0);
    let taken_back = Iotlb::Invalidate { first: 0x2000, last: 0x2fff };
    front.iotlb(&taken_back).unwrap();
    kept.await_settled();
    // It dies: how many replies are still to come stays unknown for all later processes.
    let mut saved = kept.saved();
    handle.leave();
    let (result, device) = second.join().unwrap();
    result.unwrap();
    assert!(device.events.contains(&Event::Iotlb(taken_back)));
    let on_channel = |event: &&Event| matches!(event, Event::Reply(..) | Event::ChannelLost);
    let miss = Iotlb::Miss { iova: 0x2000, access: Access::Read };
    let on_channel_events: Vec<_> = device.events.iter().filter(on_channel).collect();
    assert_eq!(on_channel_events, [&Event::Reply(miss, 0x2000, false)]);
    for page in [3, 4] {
        let (kept, handle, served) =
            served(theirs.try_clone().unwrap(), with_miss(page), Some(saved));
        assert!(channel.recv_all(None, &mut requests).unwrap());
        channel.reply(&BackendRequest { need_reply: true, ..requests[0] }, false).unwrap();
        until(|| rustix::io::ioctl_fionread(&back).unwrap() == 0);
        handle.leave();
        let (result, device) = served.join().unwrap();
        result.unwrap();
        assert_eq!(device.events.iter().find(on_channel), None);
        saved = kept.saved();
    }
    let need_reply: Vec<bool> = requests.iter().map(|request| request.need_reply).collect();
    assert_eq!(need_reply, [true, true, false, false]);
}

#[test]
fn a_lost_channel_is_not_passed_to_the_next_process() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let first = Device::default();
    let lost = Arc::clone(&first.lost);
    let (notes, handle, first) = served(theirs.try_clone().unwrap(), first, None);
    let (mut front, channel, back) = with_channel(ours);
    drop((channel, back));
    until(|| lost.load(Ordering::Relaxed) > 0);
    front.queue_num().unwrap();
    handle.leave();
    first.join().unwrap().0.unwrap();
    let (_, _, second) = served(theirs, Device::default(), Some(notes.saved()));
    drop(front);
    let (result, device) = second.join().unwrap();
    result.unwrap();
    assert!(!device.events.contains(&Event::Channel), "{:?}", device.events);
}

#[test]
fn a_channel_in_the_midst_of_a_message_is_not_left() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (notes, handle, served) = served(theirs, Device::default(), None);
    let mut front = Frontend::new(end(ours), LONG);
    front.negotiate(VERSION_1 | F_ACCESS_PLATFORM, ProtocolFeatures::KNOWN).unwrap();
    let (mut channel, back) = UnixStream::pair().unwrap();
    front.set_backend_channel(back.as_fd()).unwrap();
    channel.write_all(&[1; 3]).unwrap();
    until(|| rustix::io::ioctl_fionread(&back).unwrap() == 0);
    handle.leave();
    served.join().unwrap().0.unwrap();
    assert!(notes.0.lock().unwrap().kept.is_none());
    assert!(front.features().is_err());
}

#[test]
fn a_connection_goes_on_before_its_driver_has_settled() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (notes, handle, first) = served(theirs.try_clone().unwrap(), Device::default(), None);
    let mut front = Frontend::new(end(ours), LONG);
    let offered = front.features().unwrap();
    notes.await_settled();
    handle.leave();
    first.join().unwrap().0.unwrap();
    let (_, _, second) = served(theirs, Device::default(), Some(notes.saved()));
    assert_eq!(front.features().unwrap(), offered);
    drop(front);
    let (result, device) = second.join().unwrap();
    result.unwrap();
    assert_eq!(device.events, []);
}

#[test]
fn a_connection_that_cannot_go_on_reports_it_and_ends() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (notes, handle, first) = served(theirs.try_clone().unwrap(), Device::default(), None);
    let mut front = begun(ours);
    handle.leave();
    first.join().unwrap().0.unwrap();
    // It offers less than was negotiated; it has no rings.
    let less = Device { features: 0, ..Device::default() };
    let none = Device { refuses_rings: true, ..Device::default() };
    for device in [less, none] {
        let (kept, _, served) = served(theirs.try_clone().unwrap(), device, Some(notes.saved()));
        let error = served.join().unwrap().0.unwrap_err();
        assert!(matches!(error, ServeError::Wire(_) | ServeError::NotResumed { .. }), "{error}");
        assert!(kept.0.lock().unwrap().kept.is_none(), "no other process can go on");
    }
    assert!(front.features().is_err(), "it is hung up");
}

/// As a disk that has lost its request to discard.
#[test]
fn a_feature_that_is_only_tolerated_is_served_and_not_offered() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (notes, handle, first) = served(theirs.try_clone().unwrap(), Device::default(), None);
    let mut front = begun(ours);
    let offered = front.features().unwrap();
    handle.leave();
    first.join().unwrap().0.unwrap();
    let (lost, features) = (VERSION_1, F_ACCESS_PLATFORM);
    let less = || Device { features, tolerated: lost, ..Device::default() };
    let (_, handle, served_again) = served(theirs, less(), Some(notes.saved()));
    assert_eq!(front.features().unwrap(), offered & !lost, "its driver has it all the same");
    handle.leave();
    served_again.join().unwrap().0.unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (_, _, served) = served(theirs, less(), None);
    let mut other = Frontend::new(ours, LONG);
    assert_eq!(other.features().unwrap() & lost, 0, "another is not offered it");
    drop(other);
    served.join().unwrap().0.unwrap();
}

#[test]
fn what_ends_or_cannot_be_stopped_is_not_kept() {
    for stopped_at in [Some(1), None] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let device = Device { stopped_at, ..Device::default() };
        let (notes, handle, served) = served(theirs, device, None);
        let mut front = begun(ours);
        match stopped_at {
            Some(_) => drop(front),
            None => {
                handle.leave();
                served.join().unwrap().0.unwrap();
                assert!(notes.0.lock().unwrap().kept.is_none());
                assert!(front.features().is_err());
                continue;
            }
        }
        served.join().unwrap().0.unwrap();
        assert!(notes.0.lock().unwrap().kept.is_none());
    }
}
