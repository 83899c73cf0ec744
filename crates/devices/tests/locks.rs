//! Mutual exclusion with QEMU's tools by locks on images. A test process of its own: a child that
//! is being started has a copy of each descriptor for a moment, and so of each lock.

use std::{
    io::{Read, Write},
    path::Path,
    process::{Command, Output, Stdio},
    sync::Mutex,
};

use ringfence_devices::disk::{Image, ImageError, ImageOptions};

static ALONE: Mutex<()> = Mutex::new(());

fn file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    file
}

fn open(file: &tempfile::NamedTempFile, read_only: bool) -> Result<Image, ImageError> {
    Image::open(file.path(), ImageOptions { read_only, ..ImageOptions::default() })
}

/// Reports what was not tested, past the capture of test output.
fn absent(name: &str, error: &std::io::Error) {
    let text = format!("NOT TESTED: locks against {name}, which does not run: {error}\n");
    std::io::stderr().write_all(text.as_bytes()).unwrap();
}

fn run(name: &str, arguments: &[&str], image: &Path) -> Option<Output> {
    let output = Command::new(name).args(arguments).arg(image).output();
    output.inspect_err(|error| absent(name, error)).ok()
}

/// Whether it failed because of the lock.
fn refused(output: &Output) -> bool {
    let text = String::from_utf8_lossy(&output.stderr);
    let refused = text.contains("Failed to get") && text.contains("lock");
    assert_ne!(refused, output.status.success(), "{text}");
    refused
}

#[test]
fn tools_of_qemu_that_change_an_image_are_kept_out() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let file = file();
    let all = |free: bool, when: &str| {
        for (name, arguments, reads) in [
            ("qemu-io", &["-f", "raw", "-c", "write 0 4096"][..], false),
            ("qemu-img", &["bench", "-w", "-c", "1", "-f", "raw"], false),
            ("qemu-img", &["create", "-f", "raw", "-o", "size=1M"], false),
            ("qemu-io", &["-r", "-f", "raw", "-c", "read 0 4096"], true),
            ("qemu-img", &["info", "-f", "raw"], true),
        ] {
            if let Some(output) = run(name, arguments, file.path()) {
                assert_eq!(refused(&output), !free && !reads, "{when}: {name} {arguments:?}");
            }
        }
    };
    all(true, "without a service");
    let writer = open(&file, false).unwrap();
    all(false, "a service that writes");
    drop(writer);
    all(true, "a service that has ended");
    let reader = open(&file, true).unwrap();
    all(false, "a service that reads");
    drop(reader);
    let options = ImageOptions { hand_over: true, ..ImageOptions::default() };
    let moves = Image::open(file.path(), options).unwrap();
    all(true, "one without a guest");
    moves.take(|| false).unwrap();
    all(false, "one with a guest");
    moves.release(|| false, || false).unwrap();
    all(true, "one whose guest has moved");
}

#[test]
fn an_image_that_qemu_uses_is_not_taken() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let file = file();
    for (arguments, writes) in [(["-f", "raw"], true), (["-r", "-fraw"], false)] {
        let mut command = Command::new("qemu-io");
        command.args(arguments).arg(file.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return absent("qemu-io", &error),
        };
        // It prompts for a command once it has the image, and ends when there is none.
        let mut prompt = [0; 8];
        child.stdout.as_mut().unwrap().read_exact(&mut prompt).unwrap();
        assert_eq!(&prompt, b"qemu-io>");
        for read_only in [false, true] {
            let taken = open(&file, read_only);
            assert_eq!(matches!(taken, Err(ImageError::Locked)), writes, "{read_only}");
            assert_eq!(taken.is_ok(), !writes);
        }
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        open(&file, false).unwrap();
    }
}
