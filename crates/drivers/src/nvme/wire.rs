//! Commands and their completions (NVMe 1.4, sections 4.2 and 4.6).

use core::fmt;

/// Opcodes of the admin queue.
pub(super) mod admin {
    pub(in crate::nvme) const DELETE_SUBMIT: u8 = 0x00;
    pub(in crate::nvme) const CREATE_SUBMIT: u8 = 0x01;
    pub(in crate::nvme) const DELETE_COMPLETE: u8 = 0x04;
    pub(in crate::nvme) const CREATE_COMPLETE: u8 = 0x05;
    pub(in crate::nvme) const IDENTIFY: u8 = 0x06;
    pub(in crate::nvme) const SET_FEATURES: u8 = 0x09;
}

/// Opcodes of I/O queues.
pub(super) mod io {
    pub(in crate::nvme) const FLUSH: u8 = 0x00;
    pub(in crate::nvme) const WRITE: u8 = 0x01;
    pub(in crate::nvme) const READ: u8 = 0x02;
    pub(in crate::nvme) const DATASET: u8 = 0x09;
}

/// Bytes of a [`Command`].
pub(super) const COMMAND_BYTES: usize = 64;
/// Bytes of a completion.
pub(super) const COMPLETION_BYTES: usize = 16;

/// A command, as the device reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command(pub(super) [u32; COMMAND_BYTES / 4]);

impl Command {
    pub(super) fn new(opcode: u8, namespace: u32) -> Command {
        let mut words = [0; COMMAND_BYTES / 4];
        words[0] = opcode.into();
        words[1] = namespace;
        Command(words)
    }

    /// Its number in the queue.
    pub(super) fn id(mut self, id: u16) -> Command {
        self.0[0] = self.0[0] & 0xffff | u32::from(id) << 16;
        self
    }

    /// Its data, as two PRP entries (see [`prp`](super::prp)).
    pub(super) fn data(self, [first, second]: [u64; 2]) -> Command {
        self.pair(6, first).pair(8, second)
    }

    /// One of its words; those specific to the command begin with the tenth.
    pub(super) fn word(mut self, at: usize, value: u32) -> Command {
        self.0[at] = value;
        self
    }

    /// Two of its words.
    pub(super) fn pair(self, at: usize, value: u64) -> Command {
        self.word(at, value as u32).word(at + 1, (value >> 32) as u32)
    }
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompletionEntry {
    /// The result specific to the command.
    pub(super) result: u32,
    /// The command's number, as the device reports it.
    pub(super) id: u16,
    pub(super) status: Status,
}

/// A command's status.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(u16);

impl Status {
    /// From the upper half of a completion's last word, whose lowest bit is the phase, not status.
    pub(super) fn new(half: u16) -> Status {
        Status(half >> 1)
    }

    /// Whether the command succeeded.
    pub fn is_ok(self) -> bool {
        self.kind() == 0 && self.code() == 0
    }

    /// The status code type: 0 generic, 1 command specific, 2 media and data integrity, 7 vendor
    /// specific.
    pub fn kind(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// The status code, whose meaning depends on the [`kind`](Self::kind).
    pub fn code(self) -> u8 {
        self.0 as u8
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match (self.kind(), self.code()) {
            (0, 0x00) => "success",
            (0, 0x01) => "invalid opcode",
            (0, 0x02) => "invalid field",
            (0, 0x04) => "data transfer error",
            (0, 0x06) => "internal error",
            (0, 0x07 | 0x08) => "aborted",
            (0, 0x0b) => "invalid namespace",
            (0, 0x13) => "invalid PRP offset",
            (0, 0x80) => "LBA out of range",
            (2, 0x80) => "write fault",
            (2, 0x81) => "unrecovered read error",
            (2, 0x86) => "access denied",
            _ => "failed",
        };
        write!(f, "{meaning} (status {:#x}/{:#04x})", self.kind(), self.code())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_its_fields_where_they_belong() {
        let command = Command::new(io::READ, 7).id(0xabcd).data([0x1_2345_6000, 0x9_8765_4000]);
        let command = command.pair(10, 0x11_2222_3333);
        assert_eq!(command.0[0], 0xabcd_0002);
        assert_eq!(command.0[1], 7);
        assert_eq!(&command.0[6..10], [0x2345_6000, 1, 0x8765_4000, 9]);
        assert_eq!(&command.0[10..12], [0x2222_3333, 0x11]);
        assert_eq!(command.id(1).0[0], 0x1_0002);
    }

    #[test]
    fn a_status_is_what_stands_beside_the_phase() {
        assert!(Status::new(1).is_ok());
        let denied = Status::new(1 | 0x86 << 1 | 2 << 9 | 1 << 15);
        assert_eq!((denied.kind(), denied.code()), (2, 0x86));
        assert!(!denied.is_ok());
        assert_eq!(denied.to_string(), "access denied (status 0x2/0x86)");
    }
}
