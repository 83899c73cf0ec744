//! The proxy between a guest whose every byte is judged and a back end that follows a script.

mod back_end;
mod chains;
mod guest;
mod programs;
#[path = "../common/serving.rs"]
mod serving;

use std::{
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Instant,
};

use back_end::{Nonsense, Script, Seen, listen};
use guest::{Guest, LONG, MOST_BUFFERS, workers};
use ringfence_devices::proxy::{Connector, CopyBack, Proxy, ProxyOptions};
use ringfence_vhost_user::{Frontend, FrontendError, ProtocolFeatures};
pub(crate) use ringfence_virtq::{F_EVENT_IDX, F_VERSION_1};
use ringfence_virtq::{F_INDIRECT_DESC as F_INDIRECT, F_RING_PACKED as F_PACKED};
use serving::Serving;
use tempfile::TempDir;

/// What the back end's memory begins with: its ring.
const RING_BYTES: usize = 64 << 10;

/// All features that matter to rings, in all combinations.
fn features() -> impl Iterator<Item = u64> {
    let features = [F_EVENT_IDX, F_INDIRECT, F_PACKED];
    (0..8).map(move |which| {
        let chosen = features.iter().enumerate().filter(|(at, _)| which & (1 << at) != 0);
        chosen.fold(0, |all, (_, feature)| all | feature)
    })
}

/// A back end and the place where it listens.
struct Far {
    folder: TempDir,
    seen: Arc<Seen>,
}

impl Far {
    fn new(features: u64) -> Far {
        let far = Far { folder: tempfile::tempdir().unwrap(), seen: Arc::default() };
        listen(&far.path(), features, &far.seen, &[]);
        far
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn connector(&self) -> Arc<Connector> {
        Arc::new(Connector::spawn(self.path(), "proxy".into()).unwrap())
    }

    fn obeys(&self, script: Script) {
        *self.seen.script.lock() = Some(script);
    }

    /// Waits until it has no chain.
    fn wait_for_none(&self) {
        self.wait_until("it keeps its chains", |seen| *seen.has.lock() == 0);
    }

    /// Waits until it has that many chains.
    fn wait_for(&self, count: usize) {
        self.wait_until("it gets no chains", |seen| *seen.has.lock() >= count);
    }

    fn wait_until(&self, otherwise: &str, done: impl Fn(&Seen) -> bool) {
        let begun = Instant::now();
        while !done(&self.seen) {
            assert!(begun.elapsed() < LONG, "{otherwise}");
            thread::sleep(std::time::Duration::from_micros(100));
        }
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        self.seen.over.store(true, Ordering::Release);
        _ = UnixStream::connect(self.path());
    }
}

/// Submits random chains and takes them back.
fn works(guest: &mut Guest, chains: usize) {
    for round in 0..chains {
        if guest.submit() {
            guest.publish();
        }
        if round % 7 == 0 {
            guest.wait(4, true);
            guest.check();
        }
    }
    guest.wait(0, true);
    guest.check();
}

#[test]
fn chains_of_any_shape_pass_between_rings_of_any_format() {
    for front in features() {
        for back in features() {
            // Tables are offered only if the back end takes them: they may be longer than its ring.
            if front & F_INDIRECT != 0 && back & F_INDIRECT == 0 {
                continue;
            }
            let far = Far::new(back);
            // Half of them with little room for requests in flight: one of the longest fills it.
            let pool = if (front ^ back) & F_EVENT_IDX == 0 { 1 << 20 } else { 192 << 10 };
            let mut guest = Guest::with_pool(&far.path(), front, front ^ (back << 3), pool);
            works(&mut guest, 30);
            // All is over: behind the ring, nothing of any request is left.
            let bytes = far.seen.bytes();
            assert!(bytes[RING_BYTES..].iter().all(|&byte| byte == 0));
            // One queue: or it counts pairs, and not the ring that controls them. Four may be offered.
            assert_eq!(bytes.len(), 3 * (RING_BYTES + pool as usize));
        }
    }
}

#[test]
fn a_back_end_sees_what_is_in_flight_and_nothing_else() {
    let far = Far::new(0);
    let mut guest = Guest::new(&far.path(), 0, 1);
    works(&mut guest, 50);
    far.obeys(Script::Silent);
    while guest.in_flight() < 4 && guest.submit() {}
    // What the random chains are depends on how soon those before them came back: none may be read.
    while guest.readable().is_none() {
        assert!(guest.submit_with(1, 1));
    }
    guest.publish();
    far.wait_for(guest.in_flight());
    assert!(guest.readable_in(&far.seen.bytes()), "its memory is what is looked at");
    assert!(!Guest::is_seen_in(&far.seen.bytes()));
    far.obeys(Script::Honest);
    guest.wait(0, true);
    guest.check();
}

#[test]
fn a_back_end_that_breaks_its_ring_breaks_the_guests_ring_and_nothing_else() {
    use Script::{Jump, NotThere, OutOfRange, TooLong, Twice};
    let other = Far::new(0);
    let mut beside = Guest::new(&other.path(), 0, 99);
    for packed in [0, F_PACKED] {
        for script in [TooLong, NotThere, OutOfRange, Twice, Jump] {
            if matches!(script, Jump | Twice) && packed != 0 {
                // A packed ring has no index, and its script writes one entry only.
                continue;
            }
            let far = Far::new(packed);
            let mut guest = Guest::new(&far.path(), 0, 7);
            if packed == 0 {
                // (The script knows where the first entry of a packed ring is.)
                works(&mut guest, 20);
            }
            far.obeys(script);
            // Where there is nothing to write, a length means nothing.
            assert!(guest.submit_with(2, 1));
            guest.publish();
            guest.wait_for_failure();
            guest.reap(false);
            guest.check();
            works(&mut beside, 10);
        }
    }
}

#[test]
fn a_back_end_that_writes_everywhere_changes_only_what_it_was_given() {
    for packed in [0, F_PACKED] {
        let far = Far::new(packed);
        let mut guest = Guest::new(&far.path(), 0, 3);
        works(&mut guest, 20);
        far.obeys(Script::WriteAll);
        // Whether the ring lives depends on when the proxy looks at it.
        for _ in 0..20 {
            guest.submit();
            guest.publish();
            thread::sleep(std::time::Duration::from_micros(100));
            guest.reap(false);
            guest.check();
        }
    }
}

/// As a network's received packets: the driver has them back when it stops the ring.
#[test]
fn what_a_back_end_has_not_used_is_put_back_when_the_ring_stops() {
    for front in [0, F_PACKED] {
        let far = Far::new(0);
        let mut guest = Guest::new(&far.path(), front, 5);
        works(&mut guest, 30);
        far.obeys(Script::Silent);
        while guest.in_flight() < 5 && guest.submit() {}
        guest.publish();
        far.wait_for(5);
        guest.stop();
        guest.check();
        assert!(far.seen.bytes()[RING_BYTES..].iter().all(|&byte| byte == 0));
    }
}

/// As by a guest that shuts down: it waits for none of the others, and its VMM goes on.
#[test]
fn a_ring_of_which_a_back_end_has_used_the_newest_stops() {
    for front in [0, F_PACKED] {
        let far = Far::new(0);
        let mut guest = Guest::new(&far.path(), front, 5);
        far.obeys(Script::Silent);
        while guest.in_flight() < 5 && guest.submit() {}
        guest.publish();
        far.wait_for(5);
        far.obeys(Script::Newest);
        while guest.reap(true) == 0 {
            std::thread::yield_now();
        }
        assert!(guest.base().is_some());
        // Its connection goes on.
        assert!(guest.base().is_some());
    }
}

#[test]
fn a_back_end_whose_replies_are_nonsense_is_refused_and_the_next_one_served() {
    use Nonsense::{Ahead, Code, Half, Old, Request, Size};
    const FIRST: &[Nonsense] = &[Code, Request, Size, Half, Ahead, Old];
    let reasons = [
        "a reply to GET_VRING_BASE",
        "flags 0x1; it must have 5",
        "a payload of 4294967295 bytes",
        "hung up in the middle",
        "a reply to SET_FEATURES",
        "does not offer VERSION_1",
    ];
    let far = Far { folder: tempfile::tempdir().unwrap(), seen: Arc::default() };
    listen(&far.path(), 0, &far.seen, FIRST);
    let connector = far.connector();
    for (nonsense, reason) in FIRST.iter().zip(reasons) {
        let refused = Proxy::connect(ProxyOptions::new("proxy", 4), &connector, workers());
        let why = refused.err().unwrap_or_else(|| panic!("{nonsense:?}")).to_string();
        assert!(why.contains(reason), "{nonsense:?}: {why}");
    }
    let mut guest = Guest::behind(&connector, 0, 5, ProxyOptions::new("proxy", 4));
    works(&mut guest, 20);
}

#[test]
fn what_a_back_end_writes_and_does_not_report_comes_back_if_all_does() {
    for copy_back in [CopyBack::Used, CopyBack::All] {
        let far = Far::new(0);
        far.obeys(Script::Untold);
        let connector = far.connector();
        let options = ProxyOptions { copy_back, ..ProxyOptions::new("proxy", 4) };
        let mut guest = Guest::behind(&connector, 0, 13, options);
        works(&mut guest, 20);
    }
}

#[test]
fn a_back_end_that_hangs_up_ends_the_connection_in_front() {
    let far = Far::new(0);
    let mut guest = Guest::new(&far.path(), 0, 11);
    works(&mut guest, 5);
    far.obeys(Script::HangUp);
    assert!(guest.submit());
    guest.publish();
    guest.wait_for_end();
    guest.check();
}

/// A front end of a proxy that has no ring yet, and the proxy.
fn without_rings(far: &Far) -> (Frontend, Serving) {
    let proxy = Proxy::connect(ProxyOptions::new("proxy", 4), &far.connector(), workers());
    let (serving, ours) = Serving::start(proxy.unwrap());
    let mut main = Frontend::new(ours, LONG);
    main.negotiate(F_VERSION_1, ProtocolFeatures::REPLY_ACK | ProtocolFeatures::CONFIG).unwrap();
    (main, serving)
}

#[test]
fn so_does_one_that_hangs_up_before_a_ring_has_started() {
    let far = Far::new(0);
    let (_main, mut serving) = without_rings(&far);
    far.seen.hang_up();
    _ = serving.ended();
}

#[test]
fn a_configuration_that_the_back_end_refuses_is_refused() {
    let far = Far::new(0);
    let (mut main, _serving) = without_rings(&far);
    for _ in 0..2 {
        let refused = main.config(0, &mut [0; 60]);
        assert!(matches!(refused, Err(FrontendError::Refused { .. })), "{refused:?}");
    }
    far.seen.hang_up();
    assert!(main.config(0, &mut [0; 60]).is_err());
}

/// As QEMU stops a device: it disables the ring first, and the back end completes what it has.
#[test]
fn what_a_back_end_completes_while_its_ring_is_disabled_is_completed_once() {
    for front in [0, F_PACKED] {
        let far = Far::new(0);
        let mut guest = Guest::new(&far.path(), front, 21);
        works(&mut guest, 30);
        far.obeys(Script::Silent);
        while guest.in_flight() < 5 && guest.submit() {}
        guest.publish();
        far.wait_for(5);
        guest.disable();
        far.obeys(Script::Honest);
        far.wait_for_none();
        guest.stop();
        assert_eq!(guest.in_flight(), 0, "all are completed");
        guest.check();
    }
}

/// The kick came while the back end was busy, and the ring was disabled when it looked.
#[test]
fn a_kick_that_a_back_end_has_lost_is_given_again_when_its_ring_is_enabled() {
    for front in [0, F_PACKED] {
        let far = Far::new(0);
        let mut guest = Guest::new(&far.path(), front, 23);
        works(&mut guest, 5);
        far.obeys(Script::Deaf);
        far.wait_until("it hears", |seen| seen.lost.lock().is_some());
        assert!(guest.submit());
        guest.publish();
        far.wait_until("it gets no kick", |seen| *seen.lost.lock() == Some(1));
        assert_eq!(guest.in_flight(), 1);
        guest.disable();
        guest.enable();
        guest.wait(0, true);
        guest.check();
    }
}

#[test]
fn a_pool_of_no_bytes_is_one_page() {
    let far = Far::new(F_INDIRECT);
    let mut guest = Guest::with_pool(&far.path(), F_INDIRECT, 2, 0);
    assert!(guest.submit_of(1));
    guest.publish();
    guest.wait(0, true);
    guest.check();
    assert_eq!(far.seen.bytes().len(), 3 * (RING_BYTES + 4096));
}

#[test]
fn a_chain_that_no_pool_holds_stops_its_ring() {
    let far = Far::new(F_INDIRECT);
    let mut guest = Guest::with_pool(&far.path(), F_INDIRECT, 2, 24 << 10);
    for _ in 0..20 {
        // Up to 20 KiB: more than half of it.
        assert!(guest.submit_of(5));
        guest.publish();
        assert!(!guest.comes_back_or_fails());
    }
    assert!(guest.submit_of(MOST_BUFFERS));
    guest.publish();
    assert!(guest.comes_back_or_fails());
    guest.check();
}
