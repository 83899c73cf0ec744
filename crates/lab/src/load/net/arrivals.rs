//! What came, what was lost, what was wrong.

use ringfence_devices::net::frame::{HEADER, PACKET, number, one_buffer};

/// What the frames that arrive should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Those that were sent, in order.
    Own,
    /// Foreign ones: of one length, with the same Ethernet, IPv4 and UDP headers. After these,
    /// generators leave whatever was in their buffers.
    Foreign,
    /// The one of number 0, again and again.
    First,
}

/// The part of a foreign packet that does not change.
const HEADERS: usize = HEADER + 14 + 20 + 8;

/// Counts of frames. Every frame that was sent is counted once: as good, as corrupt, as lost, or it
/// is outstanding.
#[derive(Clone, Debug)]
pub struct Arrivals {
    expect: Expect,
    /// Frames that were sent.
    pub sent: u64,
    /// Frames that came as they were sent.
    pub good: u64,
    /// Packets that match no frame that could come.
    pub corrupt: u64,
    /// Frames that did not come although later ones did, or that were given up.
    pub lost: u64,
    /// Frames that came after they had been counted as lost, or a second time.
    pub late: u64,
    /// The number that should come next.
    next: u64,
    /// The first foreign frame.
    first: Option<[u8; PACKET]>,
}

impl Arrivals {
    /// Counts of no frames.
    pub fn new(expect: Expect) -> Arrivals {
        let (sent, good, corrupt, lost, late) = (0, 0, 0, 0, 0);
        Arrivals { expect, sent, good, corrupt, lost, late, next: 0, first: None }
    }

    /// Counts a packet of `len` bytes that lies in one buffer, of which the first are `packet`.
    #[inline]
    pub fn note(&mut self, packet: &[u8; PACKET], len: u32) {
        let whole = len as usize == PACKET;
        match self.expect {
            Expect::Own => {}
            Expect::Foreign => {
                let first = self.first.get_or_insert(*packet);
                let alike = packet[..HEADERS] == first[..HEADERS];
                return self.count(alike && whole && one_buffer(packet));
            }
            Expect::First => return self.count(whole && number(packet) == Some(0)),
        }
        let number = number(packet).filter(|&number| whole && number < self.sent);
        match number {
            Some(number) if number >= self.next => {
                // Order is kept, so those before it will not come any more.
                self.lost += number - self.next;
                self.next = number + 1;
                self.good += 1;
            }
            Some(_) => self.late += 1,
            None => {
                self.corrupt += 1;
                // It stands for one that was sent, if there is one.
                self.next = (self.next + 1).min(self.sent);
            }
        }
    }

    fn count(&mut self, good: bool) {
        *if good { &mut self.good } else { &mut self.corrupt } += 1;
    }

    /// What is outstanding is lost.
    pub fn give_up(&mut self) {
        self.lost += self.outstanding();
        self.next = self.sent;
    }

    /// Frames that are neither back nor lost yet.
    #[inline]
    pub fn outstanding(&self) -> u64 {
        self.sent - self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::net::packet;

    fn received(number: u64) -> [u8; PACKET] {
        let mut packet = packet(number);
        packet[10] = 1;
        packet
    }

    fn account(arrivals: &Arrivals) -> [u64; 5] {
        let Arrivals { good, corrupt, lost, late, .. } = *arrivals;
        [good, corrupt, lost, late, arrivals.outstanding()]
    }

    #[test]
    fn a_gap_is_a_loss() {
        let mut arrivals = Arrivals::new(Expect::Own);
        arrivals.sent += 10;
        for number in [0, 1, 5] {
            arrivals.note(&received(number), PACKET as u32);
        }
        assert_eq!(account(&arrivals), [3, 0, 3, 0, 4]);
        arrivals.note(&received(3), PACKET as u32);
        assert_eq!(account(&arrivals), [3, 0, 3, 1, 4], "out of order is late");
        arrivals.give_up();
        assert_eq!(account(&arrivals), [3, 0, 7, 1, 0]);
    }

    #[test]
    fn a_wrong_byte_or_length_is_corrupt() {
        let mut arrivals = Arrivals::new(Expect::Own);
        arrivals.sent += 4;
        let mut wrong = received(0);
        wrong[PACKET - 1] ^= 1;
        arrivals.note(&wrong, PACKET as u32);
        arrivals.note(&received(1), PACKET as u32 + 1);
        arrivals.note(&received(9), PACKET as u32);
        assert_eq!(account(&arrivals), [0, 3, 0, 0, 1], "9 was never sent");
        arrivals.note(&received(3), PACKET as u32);
        assert_eq!(account(&arrivals), [1, 3, 0, 0, 0]);
    }

    #[test]
    fn foreign_frames_have_the_same_headers() {
        let mut arrivals = Arrivals::new(Expect::Foreign);
        for number in [7, 7, 8] {
            arrivals.note(&received(number), PACKET as u32);
        }
        assert_eq!(account(&arrivals), [2, 1, 0, 0, 0]);
        let mut other = received(7);
        other[HEADERS] ^= 1;
        arrivals.note(&other, PACKET as u32);
        assert_eq!(account(&arrivals), [3, 1, 0, 0, 0], "but for what is behind the headers");
        arrivals.note(&other, PACKET as u32 - 1);
        assert_eq!(account(&arrivals), [3, 2, 0, 0, 0]);
    }
}
