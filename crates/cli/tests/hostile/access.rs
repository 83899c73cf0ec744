//! Who may connect, and where paths lead.

use std::{
    fs,
    io::{ErrorKind::ConnectionReset, Read as _},
    os::unix::{
        fs::{MetadataExt as _, lchown, symlink},
        net::UnixStream,
    },
};

use rustix::process::{Signal, getegid, geteuid};

use crate::{
    common::{LIMIT, Place, Running},
    guest::Session,
};

fn started(place: &Place, more: &[&str]) -> Running {
    place.write("disk.img", vec![0; 1 << 20]);
    let fixed = ["blk", "--socket", "s", "--image", "disk.img"];
    let mut running = place.start(&[&fixed[..], more].concat());
    running.wait_for(|line| line.contains("listening on s"));
    running
}

fn ends(running: Running) {
    running.signal(Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.code(), 0, "{ended}");
}

#[test]
fn only_users_that_are_named_are_served() {
    let (own, other) = (geteuid().as_raw().to_string(), "54321");
    for (users, served) in [(&[&*own, other][..], true), (&[other], false)] {
        let place = Place::new();
        let named: Vec<&str> = users.iter().flat_map(|user| ["--allow-uid", *user]).collect();
        let mut running = started(&place, &named);
        match served {
            true => drop(Session::open(&place.path("s"), 0)),
            false => {
                let mut stream = UnixStream::connect(place.path("s")).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                // It may be hung up on before it has sent anything, or be reset.
                let read = stream.read(&mut [0]);
                assert!(matches!(&read, Ok(0)) || read.is_err_and(|e| e.kind() == ConnectionReset));
                running.wait_for(|line| line.contains("is not among those of --allow-uid"));
            }
        }
        ends(running);
    }
}

#[test]
fn a_socket_has_the_group_that_it_is_given() {
    // Another group, where that is allowed.
    let group = if geteuid().is_root() { 54321 } else { getegid().as_raw() };
    for (more, mode) in [(&[][..], 0o660), (&["--socket-mode", "620"], 0o620)] {
        let place = Place::new();
        let group = group.to_string();
        let running = started(&place, &[&["--socket-group", &*group], more].concat());
        let about = fs::metadata(place.path("s")).unwrap();
        assert_eq!((about.gid().to_string(), about.mode() & 0o777), (group, mode));
        ends(running);
    }
    let place = Place::new();
    let wrong = ["--socket", "s", "--image", "x", "--socket-group", "no such group"];
    place.run(&[&["blk"], &wrong[..]].concat()).refused(&["no such group"]);
}

#[test]
#[ignore = "it takes root to make another user's links"]
fn a_link_of_another_user_leads_nowhere() {
    let place = Place::new();
    place.write("disk.img", vec![0; 1 << 20]);
    fs::create_dir(place.path("real")).unwrap();
    for (name, target) in [("image", "disk.img"), ("folder", "real")] {
        symlink(target, place.path(name)).unwrap();
    }
    let arguments = |socket, image, figures| {
        ["blk", "--socket", socket, "--image", image, "--metrics", figures]
    };
    // As long as the links belong to root, they are followed.
    let mut running = place.start(&arguments("folder/s", "image", "unix:folder/m"));
    running.wait_for(|line| line.contains("listening on folder/s"));
    assert!(place.path("real/s").exists() && place.path("real/m").exists());
    ends(running);
    for name in ["image", "folder"] {
        lchown(place.path(name), Some(54321), None).unwrap();
    }
    for (socket, image, figures) in [
        ("s", "image", "unix:m"),
        ("folder/s", "disk.img", "unix:m"),
        ("s", "disk.img", "unix:folder/m"),
    ] {
        let refused = place.run(&arguments(socket, image, figures));
        assert_eq!(refused.code(), 1, "{refused}");
        assert!(refused.err.contains("is a link that user 54321 has made"), "{refused}");
    }
    let table = ["--iommu", "s", "--blk", "t=disk.img", "--viot", "folder/table"];
    let refused = place.run(&[&["guard"], &table[..]].concat());
    assert_eq!(refused.code(), 1, "{refused}");
    assert!(refused.err.contains("is a link that user 54321 has made"), "{refused}");
    assert_eq!(fs::read_dir(place.path("real")).unwrap().count(), 0);
}
