//! Path lookup that follows no symbolic link that another user can have planted.
//!
//! A path on a command line is looked up with the rights of the service, often root's. If a folder
//! on the way is writable by others (`/tmp`, a tenant's), a link there leads wherever its
//! creator wants: an image that is another tenant's disk, a socket in another service's place. So
//! each link on the way must belong to root or to the user that the service runs as, and each step
//! is taken from the folder that the one before has opened.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, PROC_SUPER_MAGIC, Stat, fstat, fstatfs, openat, readlinkat},
    io::Errno,
    process::geteuid,
};

/// As many links as Linux follows.
const MOST_LINKS: u32 = 40;
const STEP: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A name in a folder.
#[derive(Debug)]
pub struct FolderEntry {
    folder: OwnedFd,
    name: OsString,
}

impl FolderEntry {
    /// Finds the folder that `path` leads to; what its last part names need not be there.
    ///
    /// # Errors
    /// A link on the way is neither root's nor this user's; there is no such folder; the path has
    /// no last part, or that is `..`.
    pub fn of(path: &Path) -> io::Result<FolderEntry> {
        let mut walk = Walk::new(path)?;
        let name = walk.left.pop_back().filter(|name| name != "/" && name != "..");
        let name = name.ok_or(Errno::INVAL)?;
        while let Some(step) = walk.left.pop_front() {
            walk.enter(&step)?;
        }
        Ok(FolderEntry { folder: walk.at, name })
    }

    /// Its folder.
    pub fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// Its name there.
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// A descriptor (`O_PATH`) of what is there, and what `fstat` returns of it: of a link itself,
    /// not of what it names.
    ///
    /// # Errors
    /// There is nothing, or the system's error.
    pub fn look(&self) -> io::Result<(OwnedFd, Stat)> {
        let file = openat(&self.folder, &self.name, STEP, Mode::empty())?;
        let about = fstat(&file)?;
        Ok((file, about))
    }
}

/// Opens the file at `path`, which may be a link as the folders on the way may.
///
/// # Errors
/// A link belongs neither to root nor to this user, or the system's error.
pub fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let mut walk = Walk::new(path)?;
    if path.as_os_str().is_empty() {
        return Err(Errno::NOENT.into());
    }
    loop {
        // What is left of `.` is where it is.
        let step = walk.left.pop_front().unwrap_or_else(|| ".".into());
        if !walk.left.is_empty() {
            walk.enter(&step)?;
            continue;
        }
        let how = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&walk.at, &step, how, Mode::empty()) {
            // Also where it is no link, but the way through it would be one.
            Err(Errno::LOOP) => {
                if let Some(file) = walk.follow(&step, flags)? {
                    return Ok(file.into());
                }
            }
            other => return Ok(other?.into()),
        }
    }
}

struct Walk {
    /// Where it is.
    at: OwnedFd,
    /// The steps that are left: names, `..` and, for the beginning, `/`.
    left: VecDeque<OsString>,
    links: u32,
}

impl Walk {
    fn new(path: &Path) -> io::Result<Walk> {
        // The working directory need not be one that this user may search.
        let begin = if path.is_absolute() { "/" } else { "." };
        let at = openat(CWD, begin, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let mut walk = Walk { at, left: VecDeque::new(), links: 0 };
        walk.add(path);
        Ok(walk)
    }

    /// Has it go along `path` before what is left.
    fn add(&mut self, path: &Path) {
        for part in path.components().rev() {
            if part != Component::CurDir {
                self.left.push_front(part.as_os_str().to_owned());
            }
        }
    }

    /// One step, to a folder or by a link.
    fn enter(&mut self, step: &OsStr) -> io::Result<()> {
        // That it must be a folder has it mounted, where it is mounted on use.
        let folder = OFlags::PATH | OFlags::DIRECTORY;
        match openat(&self.at, step, STEP | folder, Mode::empty()) {
            Ok(next) => self.at = next,
            Err(Errno::NOTDIR) => {
                if let Some(next) = self.follow(step, folder)? {
                    self.at = next;
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Follows the link. Returns what it names if only the kernel knows that.
    fn follow(&mut self, step: &OsStr, flags: OFlags) -> io::Result<Option<OwnedFd>> {
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        let link = openat(&self.at, step, STEP, Mode::empty())?;
        let about = fstat(&link)?;
        if FileType::from_raw_mode(about.st_mode) != FileType::Symlink {
            return Err(Errno::NOTDIR.into());
        }
        if fstatfs(&self.at)?.f_type == PROC_SUPER_MAGIC {
            // A process's files, which may have no name.
            let file = openat(&self.at, step, flags | OFlags::CLOEXEC, Mode::empty())?;
            return Ok(Some(file));
        }
        may_lead(step, about.st_uid, geteuid().as_raw())?;
        let target = readlinkat(&link, "", Vec::new())?;
        self.add(&PathBuf::from(OsString::from_vec(target.into_bytes())));
        Ok(None)
    }
}

/// Whether a link of that owner is followed for that user.
fn may_lead(link: &OsStr, owner: u32, user: u32) -> io::Result<()> {
    if owner == 0 || owner == user {
        return Ok(());
    }
    let why = format!(
        "{} is a link that user {owner} has made, which could lead anywhere: name what it leads to",
        Path::new(link).display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::Read as _,
        os::{fd::AsRawFd as _, unix::fs::symlink},
    };

    use super::*;

    fn read(path: &Path) -> io::Result<String> {
        let mut text = String::new();
        open(path, OFlags::RDONLY)?.read_to_string(&mut text).map(|_| text)
    }

    #[test]
    fn a_path_leads_where_the_system_would_lead_it() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/b/file"), "here").unwrap();
        symlink("a/b", at("relative")).unwrap();
        symlink(at("a"), at("absolute")).unwrap();
        symlink("../relative/file", at("a/last")).unwrap();
        symlink("circle", at("circle")).unwrap();
        for name in ["a/b/file", "a/./b/../b//file", "relative/file", "absolute/b/file", "a/last"] {
            assert_eq!(read(&at(name)).unwrap(), "here", "{name}");
        }
        assert!(open(Path::new("."), OFlags::RDONLY).unwrap().metadata().unwrap().is_dir());
        assert_eq!(read(Path::new("")).unwrap_err().kind(), io::ErrorKind::NotFound);
        for name in ["circle", "circle/x", "a/b/file/x", "a/none", "none/x", "a/b/file/.."] {
            let theirs = fs::File::open(at(name)).unwrap_err();
            assert_eq!(
                read(&at(name)).unwrap_err().raw_os_error(),
                theirs.raw_os_error(),
                "{name}"
            );
        }
        // What only the kernel knows.
        let file = fs::File::open(at("a/b/file")).unwrap();
        fs::remove_file(at("a/b/file")).unwrap();
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        assert_eq!(read(Path::new(&name)).unwrap(), "here");
    }

    #[test]
    fn links_of_root_and_of_the_same_user_lead_on() {
        let leads = |owner, user| may_lead(OsStr::new("link"), owner, user).is_ok();
        assert!(leads(0, 1000) && leads(1000, 1000) && leads(0, 0));
        assert!(!leads(1001, 1000) && !leads(1000, 0) && !leads(65534, 0));
    }

    #[test]
    fn a_place_is_a_name_in_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        symlink(".", folder.path().join("link")).unwrap();
        let place = FolderEntry::of(&folder.path().join("link/new")).unwrap();
        assert_eq!(place.name(), "new");
        assert_eq!(place.look().unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(folder.path().join("new"), "").unwrap();
        place.look().unwrap();
        for wrong in ["/", "..", "", "a/.."] {
            assert!(FolderEntry::of(Path::new(wrong)).is_err(), "{wrong}");
        }
        assert_eq!(FolderEntry::of(Path::new("Cargo.toml")).unwrap().name(), "Cargo.toml");
    }
}
