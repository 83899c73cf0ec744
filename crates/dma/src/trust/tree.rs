//! Directories that look like a system's, for tests.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

/// A directory that is gone when this is.
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn new() -> Tree {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("ringfence-{}-{next}", std::process::id()));
        fs::create_dir(&root).unwrap();
        Tree { root: root.canonicalize().unwrap() }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Where `path` lies in here.
    pub(super) fn name(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap().to_str().unwrap().to_owned()
    }

    pub(super) fn file(&self, name: &str, says: &str) {
        let file = self.path(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, says).unwrap();
    }

    pub(super) fn link(&self, name: &str, to: &str) {
        let link = self.path(name);
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(self.path(to), link).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}
