//! What queues count.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

/// Why a packet, or a receive buffer, was given back without use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lost {
    /// Not a valid packet: too short, its chain has the wrong direction, or its header does not
    /// suit it.
    Malformed,
    /// Longer than what the receiver's buffers can hold.
    TooLong,
    /// The receiver had no buffers for a while.
    NoRoom,
    /// There is no receiver.
    NoReceiver,
    /// Its memory cannot be reached.
    Unreachable,
    /// A miss for its memory was sent, and timed out.
    TimedOut,
    /// The receiver did not negotiate the offload that the packet needs.
    Offload,
    /// The queue is disabled (rule [D28]).
    ///
    /// [D28]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#d28
    Disabled,
}

impl Lost {
    /// All reasons.
    pub const ALL: [Lost; 8] = [
        Lost::Malformed,
        Lost::TooLong,
        Lost::NoRoom,
        Lost::NoReceiver,
        Lost::Unreachable,
        Lost::TimedOut,
        Lost::Offload,
        Lost::Disabled,
    ];

    /// Its name, and what it means in a few words.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Lost::Malformed => ("malformed", "no packet, or no buffer"),
            Lost::TooLong => ("too_long", "longer than the receiver's buffers"),
            Lost::NoRoom => ("no_room", "the receiver had no buffers"),
            Lost::NoReceiver => ("no_receiver", "no receiver"),
            Lost::Unreachable => ("unreachable", "memory that cannot be reached"),
            Lost::TimedOut => ("unanswered", "a translation that did not come"),
            Lost::Offload => ("offload", "work left that the receiver cannot do"),
            Lost::Disabled => ("disabled", "the queue is disabled"),
        }
    }

    /// What it means, in a few words.
    pub fn reason(self) -> &'static str {
        self.words().1
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words().0)
    }
}

/// What one queue counts. One thread writes at a time; any thread may read.
#[derive(Debug, Default)]
pub struct QueueCounters {
    packets: AtomicU64,
    bytes: AtomicU64,
    lost: [AtomicU64; Lost::ALL.len()],
    stops: AtomicU64,
}

/// One writer: no need for an atomic addition.
#[inline]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

impl QueueCounters {
    /// Packets that went through.
    pub fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// Their bytes, without virtio's header.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Packets (or receive buffers) that were lost for this reason.
    pub fn lost(&self, why: Lost) -> u64 {
        self.lost[why as usize].load(Ordering::Relaxed)
    }

    /// How often the queue was stopped because its driver broke the rules.
    pub fn stops(&self) -> u64 {
        self.stops.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn passed(&self, packets: u64, bytes: u64) {
        add(&self.packets, packets);
        add(&self.bytes, bytes);
    }

    #[cold]
    pub(super) fn lose(&self, why: Lost, packets: u64) {
        add(&self.lost[why as usize], packets);
    }

    pub(super) fn stopped(&self) {
        add(&self.stops, 1);
    }
}
