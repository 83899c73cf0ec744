//! Directories that look like a system's, for tests.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// A directory that is removed on drop.
pub(super) struct Tree {
    root: PathBuf,
    _dir: TempDir,
}

impl Tree {
    pub(super) fn new() -> Tree {
        let dir = tempfile::tempdir().unwrap();
        Tree { root: dir.path().canonicalize().unwrap(), _dir: dir }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The full name of `path` in this tree.
    pub(super) fn name(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap().to_str().unwrap().to_owned()
    }

    pub(super) fn file(&self, name: &str, contents: &str) {
        let file = self.path(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, contents).unwrap();
    }

    pub(super) fn link(&self, name: &str, to: &str) {
        let link = self.path(name);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(self.path(to), link).unwrap();
    }
}
