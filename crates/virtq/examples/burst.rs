//! Packets of 64 bytes a second from a driver to a device in another thread, in bursts, each pinned
//! to a processor and never asleep, on a split and a packed ring in turn, in many short rounds:
//! `cargo run --release -p ringfence-virtq --example burst [SECONDS [ROUNDS [WHAT]]]`
//!
//! `alone`: both ends in one thread, by turns. `rings`: the device looks at the descriptors only.
//! `copy`: it copies the bytes too.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use ringfence_mem::Translate;
use ringfence_virtq::{Desc, device, driver, testing};
use rustix::thread::{CpuSet, sched_setaffinity};

const BURST: usize = 32;
const PACKET: u32 = 64;
/// Where the buffers lie, one for each descriptor, 2 KiB apart as a network driver's are.
const DATA: u64 = 1 << 20;
const APART: u64 = 2048;

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // On a machine that has fewer, the threads share them.
    let _ = sched_setaffinity(None, &set);
}

/// Sends for `time`; returns how many packets came back.
fn drive(ring: &mut impl driver::Ring, time: Duration) -> u64 {
    let size = u64::from(ring.size());
    let mut done = [driver::Used::default(); BURST];
    let (start, mut sent, mut back) = (Instant::now(), 0_u64, 0_u64);
    let mut running = true;
    while running || back < sent {
        if running {
            let packets = (sent..sent + BURST as u64).map(|number| {
                (Desc::readable(DATA + (number & (size - 1)) * APART, PACKET), number)
            });
            sent += ring.add_burst(packets).expect("an honest device") as u64;
            ring.publish();
            let _ = ring.needs_kick();
            running = sent % (256 * BURST as u64) != 0 || start.elapsed() < time;
        }
        // Taken back late, as network drivers do: what is near the device's place bounces between
        // the processors' caches.
        while back < sent && (!running || ring.free_descs() < ring.size() / 2) {
            match ring.pop_burst(&mut done).expect("an honest device") {
                0 => break,
                some => back += some as u64,
            }
        }
    }
    back
}

/// Gives every packet back until told to stop.
fn serve(ring: &mut impl device::Ring, ram: &testing::Ram, copy: bool, stop: &AtomicBool) {
    let mut burst = device::Burst::new();
    let mut packet = [0; PACKET as usize];
    while !stop.load(Ordering::Relaxed) {
        if ring.pop_burst(ram, BURST, &mut burst).expect("an honest driver") == 0 {
            std::hint::spin_loop();
            continue;
        }
        for desc in burst.descs() {
            if copy {
                ram.read(desc.addr, &mut packet).expect("the driver's memory");
            }
            black_box((desc, &packet));
        }
        ring.push_used_burst(burst.iter().map(|taken| (taken.head(), 0)));
        let _ = ring.publish_used();
    }
}

/// Millions of packets a second.
fn measure(
    ram: &testing::Ram,
    mut driver: impl driver::Ring + Send,
    mut device: impl device::Ring + Send,
    copy: bool,
    seconds: f64,
) -> f64 {
    driver.suppress_notifications();
    device.suppress_kicks();
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let done = thread::scope(|scope| {
        scope.spawn(|| {
            pin(0);
            serve(&mut device, ram, copy, &stop);
        });
        pin(1);
        let done = drive(&mut driver, Duration::from_secs_f64(seconds));
        stop.store(true, Ordering::Relaxed);
        done
    });
    done as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// Both ends in one thread, by turns: what they execute, without the way between the processors.
fn alone(
    ram: &testing::Ram,
    mut driver: impl driver::Ring,
    mut device: impl device::Ring,
    seconds: f64,
) -> f64 {
    driver.suppress_notifications();
    device.suppress_kicks();
    let size = u64::from(driver.size());
    let (mut burst, mut done) = (device::Burst::new(), [driver::Used::default(); BURST]);
    let (start, mut sent) = (Instant::now(), 0_u64);
    while sent % (256 * BURST as u64) != 0 || start.elapsed().as_secs_f64() < seconds {
        let packets = (sent..sent + BURST as u64)
            .map(|number| (Desc::readable(DATA + (number & (size - 1)) * APART, PACKET), number));
        sent += driver.add_burst(packets).expect("an honest device") as u64;
        driver.publish();
        let _ = driver.needs_kick();
        device.pop_burst(ram, BURST, &mut burst).expect("an honest driver");
        black_box(burst.descs());
        device.push_used_burst(burst.iter().map(|taken| (taken.head(), 0)));
        let _ = device.publish_used();
        driver.pop_burst(&mut done).expect("an honest device");
    }
    sent as f64 / start.elapsed().as_secs_f64() / 1e6
}

fn main() {
    let mut args = std::env::args().skip(1);
    let seconds = args.next().map_or(0.05, |arg| arg.parse().expect("seconds"));
    let rounds = args.next().map_or(5, |arg| arg.parse().expect("rounds"));
    let only = args.next();
    for size in [256, 1024] {
        let ram = testing::Ram::new(0, (DATA + u64::from(size) * APART) as usize);
        for what in ["alone", "rings", "copy"] {
            if only.as_ref().is_some_and(|only| only != what) {
                continue;
            }
            let mut rates = [Vec::new(), Vec::new()];
            for packed in [false, true].repeat(rounds) {
                let config = driver::Config { size, event_idx: true, packed };
                let copy = what == "copy";
                let rate = match (what, testing::pair_of(&ram, 0, config)) {
                    ("alone", (driver::Queue::Split(front), device::Queue::Split(back))) => {
                        alone(&ram, front, back, seconds)
                    }
                    ("alone", (driver::Queue::Packed(front), device::Queue::Packed(back))) => {
                        alone(&ram, front, back, seconds)
                    }
                    (_, (driver::Queue::Split(front), device::Queue::Split(back))) => {
                        measure(&ram, front, back, copy, seconds)
                    }
                    (_, (driver::Queue::Packed(front), device::Queue::Packed(back))) => {
                        measure(&ram, front, back, copy, seconds)
                    }
                    _ => unreachable!("both ends have one format"),
                };
                rates[usize::from(packed)].push(rate);
            }
            for (format, rates) in ["split", "packed"].into_iter().zip(&mut rates) {
                rates.sort_by(f64::total_cmp);
                let (median, best) = (rates[rates.len() / 2], rates[rates.len() - 1]);
                println!(
                    "{format:6} {what:5} queue of {size:4}: median {median:6.1}, best {best:6.1} Mpps"
                );
            }
        }
    }
}
