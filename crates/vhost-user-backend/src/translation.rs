//! The device IOTLB of a back end: its front end's updates and invalidations, and its own misses.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ringfence_iommu::{GuestPhys, Iova, Prot, Range, shootdown::Shootdown};
use ringfence_iotlb::{Binding, Endpoint, Iotlb, IotlbConfig, Miss, MissSink, prot_of};
use ringfence_mem::{Access, Memory};
use ringfence_sync::{
    clock::MonotonicClock,
    wait::{Next, Notify, Wait},
};
use ringfence_vhost_user as vhost_user;
use ringfence_vhost_user::{BackendChannel, HandlerError, Shutdown};

/// How long a wait for an invalidation polls, where the CPU is not shared: longer than workers
/// take.
const AWAKE: Duration = Duration::from_millis(1);
/// How long the sleeps are after that. I/O takes longer.
const NAP: Duration = Duration::from_micros(50);

/// The device IOTLB of one vhost-user connection, which takes the front end's messages.
///
/// The views of the device's workers are made from its [`Endpoint`].
pub(crate) struct Translation {
    /// The table, for its figures.
    pub(crate) iotlb: Arc<Iotlb>,
    /// What views are made from.
    pub(crate) endpoint: Arc<Endpoint>,
    memory: Option<Arc<Memory>>,
    /// The connection of the front end whose messages come from now on, once it is served. Waits
    /// for the effect of its messages last as long as it is there.
    pub(crate) connection: Option<Shutdown>,
    /// Messages that were begun and are still to be waited for: empty between uses, kept for its
    /// allocation.
    begun: Vec<Result<u64, HandlerError>>,
}

/// Sends misses to the front end.
struct ChannelSink(Arc<BackendChannel>);

impl MissSink for ChannelSink {
    fn send(&self, misses: &[Miss]) -> usize {
        self.0.try_send(misses.iter().map(|miss| {
            let (iova, access) = (miss.iova.0, access_of(miss.access));
            (vhost_user::Iotlb::Miss { iova, access }, miss.again)
        }))
    }

    fn fail(&self, misses: &[Miss]) {
        // What there is no room for is dropped: it needs no reply.
        self.0.try_send(misses.iter().map(|miss| {
            let (iova, access) = (miss.iova.0, access_of(miss.access));
            (vhost_user::Iotlb::AccessFail { iova, access }, None)
        }));
    }
}

fn access_of(prot: Prot) -> Access {
    match (prot.contains(Prot::READ), prot.contains(Prot::WRITE)) {
        (true, true) => Access::ReadWrite,
        (false, true) => Access::Write,
        (_, false) => Access::Read,
    }
}

impl Translation {
    /// An empty IOTLB whose views belong to `shootdown`.
    pub(crate) fn new(config: IotlbConfig, shootdown: Arc<Shootdown>) -> Translation {
        let iotlb = Iotlb::new(config, Arc::clone(&shootdown));
        let endpoint = Endpoint::new(0, shootdown, Binding::Iotlb(Arc::clone(&iotlb)));
        Translation { iotlb, endpoint, memory: None, connection: None, begun: Vec::new() }
    }

    /// Sets the channel for misses; `None`: the front end is gone.
    pub(crate) fn set_channel(&self, channel: Option<Arc<BackendChannel>>) {
        self.iotlb.set_miss_sink(channel.map(|channel| Arc::new(ChannelSink(channel)) as _));
    }

    /// New memory: drops translations that lead out of it (rule D25). Views are to be given the
    /// same memory after it.
    ///
    /// # Errors
    /// The table failed.
    pub(crate) fn set_memory(&mut self, memory: &Arc<Memory>) -> Result<(), HandlerError> {
        let token = self.iotlb.retain_targets(|first, last| {
            let regions = memory.regions();
            // In one region: entries never span two.
            regions.clone().any(|r| first.0 >= r.gpa && last.0 - r.gpa < r.size)
        })?;
        self.memory = Some(Arc::clone(memory));
        self.wait(token)
    }

    /// The last ring has stopped: the front end sends no invalidations until one starts again, so
    /// all translations are dropped.
    ///
    /// Waits for workers, so that none of them uses an earlier translation, but not for I/O: that
    /// of a ring that has stopped is over, or the connection is, and then no reply is expected
    /// (rule D28).
    pub(crate) fn suspend(&self) {
        match self.iotlb.forget() {
            // A worker waits for nothing that a peer or a disk controls.
            Ok(token) => {
                pause_until(|| self.iotlb.shootdown().is_quiet(token), || false);
            }
            Err(error) => {
                tracing::error!(
                    source = %"iotlb",
                    "cannot drop the translations of the stopped rings: {error}"
                );
            }
        }
    }

    /// Carries out IOTLB messages of the front end, as
    /// [`Handler::iotlb_all`](vhost_user::Handler::iotlb_all) gets them, which have taken effect on
    /// return: waits for the workers when all are begun, so mostly once. Fails for an update
    /// outside of memory, a table that is full, or if the connection ended before I/O that uses an
    /// invalidated range.
    pub(crate) fn messages(
        &mut self,
        messages: &[vhost_user::Iotlb],
        outcomes: &mut Vec<Result<(), HandlerError>>,
    ) {
        let mut begun = std::mem::take(&mut self.begun);
        begun.extend(messages.iter().map(|message| self.begin(*message)));
        outcomes.extend(begun.drain(..).map(|begun| begun.and_then(|token| self.wait(token))));
        self.begun = begun;
    }

    /// Carries a message out except for the wait: it has taken effect when the token is over.
    fn begin(&self, message: vhost_user::Iotlb) -> Result<u64, HandlerError> {
        let range = |first, last| {
            Range::new(Iova(first), Iova(last)).ok_or_else(|| HandlerError::new("an empty range"))
        };
        Ok(match message {
            vhost_user::Iotlb::Invalidate { first, last } => {
                self.iotlb.invalidate(range(first, last)?)?
            }
            vhost_user::Iotlb::Update { first, last, access: None, .. } => {
                let range = range(first, last)?;
                let token = self.iotlb.invalidate(range)?;
                // Neither access, and so not both.
                self.iotlb.refuse(range, Prot::READ);
                self.iotlb.refuse(range, Prot::WRITE);
                token
            }
            vhost_user::Iotlb::Update { first, last, user_addr, access: Some(access) } => {
                self.update(first, last, user_addr, prot_of(access))?
            }
            _ => return Err(HandlerError::new("a message that only a back end sends")),
        })
    }

    /// Waits until the operation of `token` has taken effect, without a limit: a front end that
    /// gets its reply sooner reuses the memory (rule D15).
    ///
    /// # Errors
    /// The connection is over.
    fn wait(&self, token: u64) -> Result<(), HandlerError> {
        if token == 0 {
            return Ok(());
        }
        let is_gone = || self.connection.as_ref().is_some_and(Shutdown::is_over);
        match pause_until(|| self.iotlb.shootdown().is_over(token), is_gone) {
            true => Ok(()),
            false => Err(HandlerError::new("the connection ended before I/O that uses the range")),
        }
    }

    /// The front end's reply to a miss that was sent again, as
    /// [`Handler::channel_reply`](vhost_user::Handler::channel_reply) gets it: if there is no
    /// such translation, requests stop waiting for it.
    pub(crate) fn reply(&self, message: vhost_user::Iotlb, number: u64, done: bool) {
        if let vhost_user::Iotlb::Miss { iova, access } = message {
            self.iotlb.reply(Iova(iova), prot_of(access), number, done);
        }
    }

    /// Adds one entry for each region that the update lies in; checks all of it before any change
    /// (rule D14). Returns a token, as [`begin`](Self::begin).
    fn update(&self, first: u64, last: u64, user: u64, prot: Prot) -> Result<u64, HandlerError> {
        let memory = self.memory.as_ref().ok_or_else(|| HandlerError::new("no memory"))?;
        let outside = || HandlerError::new("an update outside of memory");
        let (mut at, mut parts) = (first, Vec::new());
        let ending = loop {
            // Cannot wrap: the update does not, at either end.
            let addr = user + (at - first);
            let reach = memory.find_user(addr).ok_or_else(outside)?.slice.len() as u64;
            let gpa = memory.user_to_gpa(addr).ok_or_else(outside)?;
            let end = last.min(at.saturating_add(reach - 1));
            let part = (Range::new(Iova(at), Iova(end)).ok_or_else(outside)?, GuestPhys(gpa));
            if end == last {
                break part;
            }
            parts.push(part);
            at = end + 1;
        };
        for (range, target) in parts {
            // Each is waited for: one token does not cover the leases on another range.
            let token = self.iotlb.update(range, target, prot)?;
            self.wait(token)?;
        }
        let (range, target) = ending;
        Ok(self.iotlb.update(range, target, prot)?)
    }
}

/// Waits until `is_over` (true) or `is_given_up` (false): for workers, which take a few
/// microseconds, or for I/O, which takes longer.
fn pause_until(is_over: impl Fn() -> bool, is_given_up: impl Fn() -> bool) -> bool {
    let (begun, mut wait) = (Instant::now(), Wait::new(Notify::Adaptive));
    while !is_over() {
        // Soon, unless it takes longer than workers do.
        let soon = || (begun.elapsed() < AWAKE).then_some(0);
        if wait.step(&MonotonicClock, soon) == Next::Look {
            // A worker that must pass its quiet point may share this CPU.
            std::thread::yield_now();
            continue;
        }
        if is_given_up() {
            return false;
        }
        std::thread::sleep(NAP);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, sync::mpsc};

    use ringfence_iotlb::View;
    use ringfence_mem::{GuestRam, Translate};
    use ringfence_vhost_user::{Handler, Offer, RingSetup, Server};

    use super::*;

    struct NoDevice;

    impl Handler for NoDevice {
        fn offer(&self) -> Offer {
            Offer::new(0, 0)
        }
        fn set_features(&mut self, _: u64) -> Result<(), HandlerError> {
            Ok(())
        }
        fn set_memory(&mut self, _: Arc<Memory>) -> Result<(), HandlerError> {
            Ok(())
        }
        fn start_ring(&mut self, _: u16, _: RingSetup) -> Result<(), HandlerError> {
            Ok(())
        }
        fn stop_ring(&mut self, _: u16) -> Result<u32, HandlerError> {
            Ok(0)
        }
        fn enable_ring(&mut self, _: u16, _: bool) -> Result<(), HandlerError> {
            Ok(())
        }
        fn set_call(
            &mut self,
            _: u16,
            _: Option<ringfence_run::PeerFd>,
        ) -> Result<(), HandlerError> {
            Ok(())
        }
    }

    fn message(
        translation: &mut Translation,
        message: vhost_user::Iotlb,
    ) -> Result<(), HandlerError> {
        let mut outcomes = Vec::new();
        translation.messages(&[message], &mut outcomes);
        outcomes.pop().unwrap()
    }

    #[test]
    fn all_messages_are_begun_before_the_workers_are_waited_for() {
        // rule D15
        let shootdown = Shootdown::new(1);
        let mut translation = Translation::new(IotlbConfig::default(), Arc::clone(&shootdown));
        let mut reader = shootdown.reader().unwrap();
        std::thread::scope(|scope| {
            let served = scope.spawn(|| {
                let invalidate = |page: u64| vhost_user::Iotlb::Invalidate {
                    first: page << 12,
                    last: page << 12 | 0xfff,
                };
                let (mut outcomes, empty) =
                    (Vec::new(), vhost_user::Iotlb::Invalidate { first: 1, last: 0 });
                translation
                    .messages(&[invalidate(1), empty, invalidate(2), invalidate(3)], &mut outcomes);
                outcomes.iter().map(Result::is_ok).collect::<Vec<_>>()
            });
            while shootdown.logged() < 3 {
                std::thread::yield_now();
            }
            assert!(!served.is_finished(), "the worker has not passed a quiet point");
            // One quiet point is enough for all of them.
            reader.poll(|_| ());
            assert_eq!(served.join().unwrap(), [true, false, true, true]);
        });
    }

    #[test]
    fn an_invalidation_waits_for_io_for_as_long_as_the_front_end_is_there() {
        // rule D15
        let ram = GuestRam::new(1 << 16, 0).unwrap();
        let memory = Memory::of_ram(&ram).unwrap();
        let mut translation = Translation::new(IotlbConfig::default(), Shootdown::new(1));
        translation.set_memory(&memory).unwrap();
        let shootdown = Arc::clone(translation.iotlb.shootdown());
        let (front, ours) = UnixStream::pair().unwrap();
        let server = Server::new(ours, NoDevice);
        translation.connection = Some(server.shutdown_handle());
        let mut view = View::new(Arc::clone(&translation.endpoint), memory).unwrap();
        let (user_addr, access) = (ram.user_addr(), Some(Access::ReadWrite));
        let update = vhost_user::Iotlb::Update { first: 0x5000, last: 0x5fff, user_addr, access };
        let invalidate = vhost_user::Iotlb::Invalidate { first: 0x5000, last: 0x5fff };
        for hangs_up in [false, true] {
            message(&mut translation, update).unwrap();
            let mut lease = view.lease(0x5000, 8);
            std::thread::scope(|scope| {
                let logged = shootdown.logged();
                let served = scope.spawn(|| message(&mut translation, invalidate));
                // Until it is begun, and far longer than any polling that it begins with.
                let begun = Instant::now();
                while shootdown.logged() == logged && !served.is_finished()
                    || begun.elapsed() < 20 * AWAKE
                {
                    view.quiet();
                }
                assert!(!served.is_finished(), "the I/O has not ended");
                if hangs_up {
                    front.shutdown(std::net::Shutdown::Both).unwrap();
                } else {
                    lease = None;
                }
                while !served.is_finished() {
                    view.quiet();
                }
                assert_eq!(served.join().unwrap().is_ok(), !hangs_up);
            });
            drop(lease);
        }
    }

    #[test]
    fn a_stop_does_not_wait_for_io_that_does_not_end_and_all_is_forgotten() {
        // rule D27
        let ram = GuestRam::new(1 << 16, 0).unwrap();
        let memory = Memory::of_ram(&ram).unwrap();
        let mut translation = Translation::new(IotlbConfig::default(), Shootdown::new(1));
        translation.set_memory(&memory).unwrap();
        let mut view = View::new(Arc::clone(&translation.endpoint), memory).unwrap();
        let user_addr = ram.user_addr();
        let access = Some(Access::ReadWrite);
        let update = vhost_user::Iotlb::Update { first: 0x5000, last: 0x5fff, user_addr, access };
        message(&mut translation, update).unwrap();
        // Like a queue that is kept, while the worker that has the view does something else.
        let lease = view.lease(0x5000, 8).unwrap();
        view.write(0x5000, &[1]).unwrap();
        // A stop that waited for the lease would never end.
        std::thread::scope(|scope| {
            // Dropped even if the rest of the test fails.
            let lease = lease;
            let (stopped, stops) = mpsc::channel();
            let translation = &translation;
            scope.spawn(move || {
                translation.suspend();
                stopped.send(()).unwrap();
            });
            // As at the beginning of each round of a worker.
            while stops.try_recv() == Err(mpsc::TryRecvError::Empty) {
                view.quiet();
            }
            drop(lease);
        });
        view.quiet();
        assert!(view.write(0x5000, &[2]).is_err());
        assert_eq!(translation.iotlb.entries(), 0);
    }
}
