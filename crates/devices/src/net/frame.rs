//! Frames for measurements and tests, of which every byte follows from the frame's number:
//! [`Link::Probe`](super::Link::Probe) sends them, and load generators do.

/// Bytes of a frame.
pub const FRAME: usize = 64;
/// Bytes of the header before each frame: virtio 1.x has `num_buffers` in it always.
pub const HEADER: usize = 12;
/// Bytes of a frame with its header.
pub const PACKET: usize = HEADER + FRAME;

/// Where `num_buffers` lies in the header.
const NUM_BUFFERS: usize = 10;
/// Both MAC addresses (locally administered) and the EtherType for local experiments, 0x88b5.
const ETHERNET: [u64; 2] = [0x0002_0000_0000_0002, 0xb588_0000_0000];
/// The frame's number is this 64-bit word of it.
const NUMBER: usize = 2;
/// Makes each word of a frame differ from the same word of another: odd, so that no two numbers
/// give the same.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// The words of frame `number`.
#[inline]
fn words(number: u64) -> [u64; FRAME / 8] {
    let mut words = [0; FRAME / 8];
    words[..2].copy_from_slice(&ETHERNET);
    words[NUMBER] = number;
    let mut mixed = number;
    for word in &mut words[NUMBER + 1..] {
        mixed = mixed.wrapping_add(SPREAD).rotate_left(23);
        *word = mixed;
    }
    words
}

/// Frame `number` with an empty header before it.
#[inline]
pub fn packet(number: u64) -> [u8; PACKET] {
    let mut packet = [0; PACKET];
    for (bytes, word) in packet[HEADER..].chunks_exact_mut(8).zip(words(number)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    packet
}

/// The number of a frame, if every byte of it is as it was sent and its header says that it lies
/// in one buffer.
#[inline]
pub fn number(packet: &[u8; PACKET]) -> Option<u64> {
    let word = |index: usize| {
        let at = HEADER + 8 * index;
        u64::from_le_bytes(packet[at..at + 8].try_into().expect("eight bytes"))
    };
    let number = word(NUMBER);
    let mut differing = 0;
    for (index, wanted) in words(number).into_iter().enumerate() {
        differing |= word(index) ^ wanted;
    }
    (differing == 0 && one_buffer(packet)).then_some(number)
}

/// Whether the header says that the packet lies in one buffer. A device that did not negotiate
/// mergeable buffers sets it as well (virtio 1.3, 5.1.6.4.1).
#[inline]
pub fn one_buffer(packet: &[u8; PACKET]) -> bool {
    packet[NUM_BUFFERS..HEADER] == [1, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As a device writes it.
    fn received(number: u64) -> [u8; PACKET] {
        let mut packet = packet(number);
        packet[NUM_BUFFERS] = 1;
        packet
    }

    #[test]
    fn it_is_an_ethernet_frame_of_a_type_for_experiments() {
        let packet = packet(7);
        assert_eq!(packet[..HEADER], [0; HEADER]);
        assert_eq!(packet[HEADER..HEADER + 6], [2, 0, 0, 0, 0, 0], "destination");
        assert_eq!(packet[HEADER] & 1, 0, "not a group's");
        assert_eq!(packet[HEADER + 12..HEADER + 14], [0x88, 0xb5]);
    }

    proptest! {
        #[test]
        fn a_frame_has_its_number(value: u64) {
            prop_assert_eq!(number(&received(value)), Some(value));
        }

        #[test]
        fn a_changed_byte_is_found(value: u64, at in NUM_BUFFERS..PACKET, flip in 1u8..) {
            let mut packet = received(value);
            packet[at] ^= flip;
            prop_assert_eq!(number(&packet), None);
        }
    }
}
