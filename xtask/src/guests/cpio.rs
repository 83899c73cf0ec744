//! A cpio archive as Linux unpacks it into its first root file system (the "newc" format).

/// An archive that is being written.
pub(crate) struct Cpio {
    bytes: Vec<u8>,
    entries: u32,
}

impl Cpio {
    /// An empty one.
    pub(crate) fn new() -> Cpio {
        Cpio { bytes: Vec::new(), entries: 0 }
    }

    /// A folder. Those above it must be there already.
    pub(crate) fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, (0, 0), &[]);
    }

    /// A file that may be executed.
    pub(crate) fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, 0o100_755, (0, 0), content);
    }

    /// A character device.
    #[allow(dead_code)] // The tests, which include this file, need none.
    pub(crate) fn device(&mut self, name: &str, number: (u32, u32)) {
        self.entry(name, 0o020_600, number, &[]);
    }

    /// The archive.
    pub(crate) fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let length = u32::try_from(content.len()).expect("a file of this archive is small");
        let name_length = name.len() as u32 + 1;
        let fields = [
            self.entries, // The inode.
            mode,
            0,
            0,
            1, // Links.
            0, // The time of its change.
            length,
            0,
            0,
            device.0,
            device.1,
            name_length,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
