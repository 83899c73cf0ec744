//! Requests per second through one queue between two threads that never sleep: `cargo run --release
//! -p ringfence-virtq --example pingpong [SECONDS]`

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use ringfence_virtq::{Chain, Desc, device, driver, layout, testing};

const SIZE: u16 = 256;

/// Adds requests of two buffers for `time`; returns how many came back.
fn drive(queue: &mut driver::Queue, data: u64, time: Duration) -> u64 {
    let request = [Desc::readable(data, 16), Desc::writable(data + 16, 1)];
    let (start, mut sent, mut done) = (Instant::now(), 0, 0);
    loop {
        if start.elapsed() < time {
            while queue.add(&request, sent).is_ok() {
                sent += 1;
            }
            queue.publish();
            let _ = queue.needs_kick();
        } else if done == sent {
            return done;
        }
        while queue.pop().expect("an honest device").is_some() {
            done += 1;
        }
    }
}

/// Gives every request back until `stop` is set.
fn serve(queue: &mut device::Queue, ram: &testing::Ram, stop: &AtomicBool) {
    let mut chain = Chain::new();
    while !stop.load(Ordering::Relaxed) {
        while queue.pop(ram, &mut chain).expect("an honest driver") {
            queue.push_used(chain.head(), chain.writable_len() as u32);
        }
        let _ = queue.publish_used();
    }
}

fn main() {
    let seconds = std::env::args().nth(1).map_or(2.0, |arg| arg.parse().expect("seconds"));
    let ram = testing::Ram::new(0, layout::offsets(SIZE).len);
    let (mut driver, mut device) = testing::pair(&ram, 0, SIZE, true);
    driver.suppress_notifications();
    device.suppress_kicks();
    let (stop, time) = (AtomicBool::new(false), Duration::from_secs_f64(seconds));
    let done = thread::scope(|scope| {
        scope.spawn(|| serve(&mut device, &ram, &stop));
        let done = drive(&mut driver, 0x10_0000, time);
        stop.store(true, Ordering::Relaxed);
        done
    });
    println!("{:.2} Mreq/s of two descriptors, queue of {SIZE}", done as f64 / seconds / 1e6);
}
