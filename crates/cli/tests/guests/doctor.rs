//! The report of `ringfence doctor` on a real guest, and whether its remedies make the guest ready.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{
    machine::Guest,
    place::Place,
    qemu::{Iommu, Qemu},
};

const SCRIPT: &str = r#"
# A copy of what the doctor looks at: links as they are, of devices only their names.
keep() {
    for name in $*; do
        mkdir -p /tmp/tree/$(dirname $name)
        if [ -L $name ]; then ln -s "$(readlink $name)" /tmp/tree/$name
        elif [ -d $name ]; then mkdir -p /tmp/tree/$name
        elif [ -f $name ]; then cat $name > /tmp/tree/$name
        elif [ -c $name ]; then : > /tmp/tree/$name
        fi
    done
}
snapshot() {
    cd /
    rm -rf /tmp/tree
    for name in limits status uid_map mountinfo; do keep proc/self/$name; done
    keep proc/swaps proc/cmdline proc/cpuinfo proc/interrupts proc/sys/kernel/osrelease
    keep sys/class/iommu/* sys/firmware/acpi/tables/DMAR sys/firmware/acpi/tables/VIOT
    keep sys/kernel/iommu_groups/*/type sys/kernel/iommu_groups/*/name
    keep sys/kernel/iommu_groups/*/devices/*
    for device in sys/bus/pci/devices/*; do
        path=$(readlink -f $device)
        keep ${path#/}/class ${path#/}/driver ${path#/}/subsystem
    done
    keep sys/class/block/* sys/dev/block/* sys/class/net/*
    keep sys/kernel/mm/transparent_hugepage/enabled sys/kernel/mm/hugepages/*/*_hugepages
    keep sys/module/* sys/module/vfio*/parameters/*
    keep lib/modules/*/modules.dep lib/modules/*/modules.builtin
    keep dev/iommu dev/vfio/* dev/vfio/devices/*
    say tree $(tar -C /tmp/tree -cz . | base64 | tr -d '\n')
}
load virtio_blk
say pci $(virtio_pci 2 0)
mkswap /dev/vda
swapon /dev/vda
snapshot
swapoff /dev/vda
while hear && [ "$line" != over ]; do eval "$line"; done
snapshot
"#;

/// The next copy that the guest sends, unpacked.
fn tree(guest: &mut Guest, into: PathBuf) -> PathBuf {
    let line = guest.hear("tree ");
    fs::create_dir(&into).unwrap();
    let mut unpack = Command::new("sh")
        .args(["-c", "base64 -d | tar -xz"])
        .current_dir(&into)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    unpack.stdin.take().unwrap().write_all(&line.as_bytes()["tree ".len()..]).unwrap();
    assert!(unpack.wait().unwrap().success());
    into
}

/// The doctor's report on a copy, and its exit status.
fn doctor(root: &Path, device: &str) -> (Value, i32) {
    let ended = Command::new(env!("CARGO_BIN_EXE_ringfence"))
        .args(["doctor", "--for", "vfio", "--device", device, "--json", "-", "--root"])
        .arg(root)
        .output()
        .unwrap();
    let json = serde_json::from_slice(&ended.stdout);
    let json = json.unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    (json, ended.status.code().unwrap())
}

fn states(json: &Value) -> Vec<(&str, &str)> {
    let checks = json["checks"].as_array().unwrap().iter();
    checks.map(|c| (c["name"].as_str().unwrap(), c["state"].as_str().unwrap())).collect()
}

/// A guest with a disk in use, which is then given to VFIO by the doctor's remedies alone.
fn what_it_says_makes_a_guest_ready(machine: Qemu, remapping: [&str; 2]) -> Value {
    let place = Place::new();
    let image = place.image("image", 32);
    let mut guest = machine.own_blk(&image, 1, "").start(&place, SCRIPT);
    let pci = guest.hear("pci ")["pci ".len()..].to_owned();
    let (before, status) = doctor(&tree(&mut guest, place.path("before")), &pci);
    assert_eq!(status, 1, "{before:#}");
    let found = states(&before);
    for (name, state) in [("iommu", "ok"), ("vfio", "lack"), ("interrupt-remapping", remapping[0])]
    {
        assert!(found.contains(&(name, state)), "{name} is not {state}\n{before:#}");
    }
    assert!(before.to_string().contains("vda is swapped to"), "{before:#}");

    for check in before["checks"].as_array().unwrap().iter().filter(|c| c["state"] == "lack") {
        let remedies = check["remedies"].as_array().unwrap();
        let name = check["name"].as_str().unwrap();
        let chosen: Vec<&Value> = match name {
            // All of its devices.
            group if group.starts_with("group-") => remedies.iter().collect(),
            // There is no firmware to set up: allowed for now, not for good.
            "interrupt-remapping" => vec![remedies.last().unwrap()],
            _ => vec![&remedies[0]],
        };
        for command in chosen.iter().flat_map(|remedy| remedy["commands"].as_array().unwrap()) {
            let command = command.as_str().unwrap();
            // A guest that lives for seconds boots only once.
            if !command.contains("/etc/") {
                guest.say(command);
            }
        }
    }
    guest.say("over");
    let (after, status) = doctor(&tree(&mut guest, place.path("after")), &pci);
    assert_eq!(status, 0, "{after:#}");
    let found = states(&after);
    assert!(found.contains(&("interrupt-remapping", remapping[1])), "{after:#}");
    assert!(found.iter().any(|(name, state)| name.starts_with("group-") && *state == "ok"));
    guest.end();
    after
}

#[test]
#[ignore = "guests: cargo xtask test --all --only more"]
fn what_the_doctor_says_makes_a_guest_ready_behind_intels_iommu() {
    what_it_says_makes_a_guest_ready(Qemu::new(Iommu::IntelStrict), ["ok", "ok"]);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn what_the_doctor_says_makes_a_guest_ready_behind_a_virtio_iommu() {
    what_it_says_makes_a_guest_ready(Qemu::new(Iommu::VirtioStrict), ["lack", "warning"]);
}

#[test]
#[ignore = "guests: cargo xtask test --only guests"]
fn a_kernel_with_iommufd_is_known_by_its_nodes() {
    let machine = Qemu::new(Iommu::IntelStrict).iommufd();
    let after = what_it_says_makes_a_guest_ready(machine, ["ok", "ok"]);
    assert!(states(&after).contains(&("iommufd", "ok")), "{after:#}");
}
