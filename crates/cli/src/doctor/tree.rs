//! Reading procfs and sysfs, or a folder that looks like them.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

/// Most bytes of a file that are read: a list of all modules is the longest.
const LONGEST: u64 = 16 << 20;
/// Most names of a folder that are read.
const MOST: usize = 1 << 16;

/// A file system to be examined: this machine's, or a folder with a copy of one.
///
/// Files that do not exist, or cannot be read, are `None` or empty: a container may show anything.
/// Results hold no control characters, so that they can be printed.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Tree {
        Tree { root: root.to_owned() }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.root.join(name).exists()
    }

    /// The content of a file.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        read(self.open(name)?)
    }

    /// The content of a file that is packed with gzip.
    pub(super) fn packed_text(&self, name: &str) -> Option<String> {
        read(flate2::read::GzDecoder::new(self.open(name)?))
    }

    fn open(&self, name: &str) -> Option<File> {
        let path = self.root.join(name);
        // Only regular files: opening a pipe would wait for its writer.
        if !fs::metadata(&path).ok()?.is_file() {
            return None;
        }
        File::open(path).ok()
    }

    /// The content of a file with a single value.
    pub(super) fn word(&self, name: &str) -> Option<String> {
        let text = self.text(name)?;
        let word = text.lines().next().unwrap_or_default().trim();
        (!word.is_empty()).then(|| word.chars().take(256).collect())
    }

    /// The content of a file with a single decimal number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.word(name)?.parse().ok()
    }

    /// Whether a parameter of a module is on; `None`: it does not exist.
    pub(super) fn switch(&self, name: &str) -> Option<bool> {
        Some(matches!(self.word(name)?.as_str(), "Y" | "y" | "1"))
    }

    /// The names in a folder, numbers by their value.
    pub(super) fn names(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(folder)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .take(MOST)
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| !name.chars().any(char::is_control))
            .collect();
        names.sort_by(|a, b| {
            let number = |name: &str| name.parse::<u64>().unwrap_or(u64::MAX);
            number(a).cmp(&number(b)).then_with(|| a.cmp(b))
        });
        names
    }

    /// The target of a symbolic link, unresolved.
    pub(super) fn link(&self, name: &str) -> Option<String> {
        let target = fs::read_link(self.root.join(name)).ok()?;
        target.to_str().map(printable)
    }

    /// The last component of a symbolic link's target: sysfs names a device's driver this way.
    pub(super) fn link_name(&self, name: &str) -> Option<String> {
        let target = self.link(name)?;
        target.rsplit('/').find(|part| !part.is_empty()).map(String::from)
    }
}

fn read(from: impl Read) -> Option<String> {
    let mut bytes = Vec::new();
    from.take(LONGEST).read_to_end(&mut bytes).ok()?;
    Some(printable(&String::from_utf8_lossy(&bytes)))
}

fn printable(text: &str) -> String {
    let show = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
    text.chars().map(show).collect()
}

/// Whether a name is safe in a command that the user is advised to run.
pub(super) fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, ':' | '.' | '_' | '-' | '+');
    !name.is_empty() && !name.starts_with('-') && name.chars().all(plain)
}

/// A made-up file system, for the tests of code that reads one.
#[cfg(test)]
pub(super) struct MadeUp(tempfile::TempDir);

#[cfg(test)]
impl MadeUp {
    pub(super) fn new(files: &[(&str, &str)]) -> MadeUp {
        let made = MadeUp(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, text)| made.file(name, text));
        made
    }

    pub(super) fn file(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(super) fn link(&self, name: &str, target: &str) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    pub(super) fn tree(&self) -> Tree {
        Tree::new(self.0.path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_or_nonsense_is_nothing() {
        let made = MadeUp::new(&[("a/number", "12\n"), ("a/word", " x y \nz"), ("a/empty", "\n")]);
        made.file("a/garbage", [0xff, 0x1b, b'[', b'1', 0, b'\n']);
        let tree = made.tree();
        assert_eq!(tree.number("a/number"), Some(12));
        assert_eq!(tree.word("a/word").as_deref(), Some("x y"));
        for name in ["a", "a/empty", "b", "a/number/c", ""] {
            assert_eq!(tree.word(name), None, "{name}");
        }
        let garbage = tree.word("a/garbage").unwrap();
        assert!(!garbage.chars().any(char::is_control), "{garbage:?}");
        assert_eq!(tree.number("a/garbage"), None);
        assert_eq!(tree.names("a"), ["empty", "garbage", "number", "word"]);
        assert_eq!(tree.names("b"), Vec::<String>::new());
        assert_eq!(tree.link_name("a/word"), None);
    }

    #[test]
    fn numbers_stand_in_their_order() {
        let made = MadeUp::new(&[("g/10", ""), ("g/9", ""), ("g/noiommu-0", "")]);
        assert_eq!(made.tree().names("g"), ["9", "10", "noiommu-0"]);
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let made = MadeUp::new(&[("a", "")]);
        let pipe = made.0.path().join("pipe");
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, rustix::fs::Mode::RWXU, 0).unwrap();
        assert_eq!(made.tree().text("pipe"), None);
    }

    #[test]
    fn only_plain_names_go_into_commands() {
        assert!(is_plain("0000:01:00.0") && is_plain("6.12.117+deb12-cloud-amd64"));
        for name in ["", "a b", "$(x)", "-rf", "a;b", "../x", "ü"] {
            assert!(!is_plain(name), "{name}");
        }
    }
}
