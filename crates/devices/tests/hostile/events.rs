//! Event descriptors, which a front end shares with the back end.

use std::os::fd::AsFd;

use ringfence_run::event;
use rustix::fs::{OFlags, fcntl_setfl};

use crate::rig::*;

#[test]
fn events_that_a_front_end_makes_blocking_and_fills_hold_up_no_worker() {
    for translated in [false, true] {
        let mut rig = Rig::new(Setup::new(translated));
        let (mut bad, mut good) = (rig.queue(0), rig.queue(1));
        bad.go_round();
        // The worker may notify of the last request now.
        while rustix::io::write(&bad.call, &(u64::MAX - 1).to_ne_bytes()).is_err() {
            event::drain(&bad.call);
        }
        // The flags are the description's, and so the worker's as well.
        fcntl_setfl(&bad.kick, OFlags::empty()).unwrap();
        fcntl_setfl(&bad.call, OFlags::empty()).unwrap();
        for _ in 0..3 {
            bad.go_round();
            good.go_round();
        }
        // Nor does the connection's end wait for it.
        rig.blk.get_vring_base(0).unwrap();
        good.go_round();
        let mut count = [0; 8];
        rustix::io::read(&bad.call, &mut count).unwrap();
        assert!(u64::from_ne_bytes(count) >= u64::MAX - 1);
    }
}

#[test]
fn what_is_not_an_eventfd_is_refused_and_the_connection_goes_on() {
    let mut rig = Rig::new(Setup::new(false));
    let mut good = rig.queue(1);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    assert!(rig.blk.set_vring_call(0, Some(writer.as_fd())).is_err());
    assert!(
        rig.blk
            .request(
                ringfence_vhost_user::msg::Request::SetVringErr { ring: 0, fd: true },
                &[writer.as_fd()]
            )
            .is_err()
    );
    let ring = rig.pages(1);
    let user = rig.ram.user_addr() + (ring.gpa() - rig.ram.gpa());
    let queue = RawQueue::new(0, ring.window().clone(), ring.gpa(), user);
    rig.blk.set_vring_num(0, SIZE).unwrap();
    rig.blk.set_vring_addr(0, &queue.addresses()).unwrap();
    // A descriptor that is hung up would be readable for ever.
    drop(writer);
    assert!(rig.blk.set_vring_kick(0, Some(reader.as_fd())).is_err());
    good.go_round();
}
