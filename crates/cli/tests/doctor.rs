//! `doctor`, as a user runs it: on this host, and on copies of other hosts' files.

mod common;

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use common::{Ended, Place};
use serde_json::Value;

/// The /proc, /sys and /dev of another host.
struct Host {
    place: Place,
    root: PathBuf,
}

impl Host {
    /// A host of which nothing can be seen.
    fn bare() -> Host {
        let place = Place::new();
        let root = place.path("root");
        fs::create_dir(&root).unwrap();
        Host { place, root }
    }

    /// A server with an IOMMU, VFIO, and enough locked memory.
    fn server() -> Host {
        let host = Host::bare();
        host.limits("unlimited");
        host.file("proc/sys/kernel/osrelease", "6.12.0-amd64\n");
        host.file("proc/cpuinfo", "vendor_id\t: GenuineIntel\nflags\t\t: fpu\n");
        host.file("proc/interrupts", " 24: 0 IR-PCI-MSI nvme0q0\n");
        host.file("sys/class/iommu/dmar0/x", "");
        for module in ["vfio", "vfio_pci", "vfio_iommu_type1"] {
            host.file(&format!("sys/module/{module}/initstate"), "live\n");
        }
        host.file("dev/vfio/vfio", "");
        host
    }

    fn limits(&self, limit: &str) {
        let text = format!("Max locked memory         {limit}    {limit}    bytes\n");
        self.file("proc/self/limits", text);
        self.file("proc/self/status", "Uid:\t1000\t1000\nCapEff:\t0000000000000000\n");
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn link(&self, name: &str, target: &str) {
        let path = self.root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    /// Adds a PCI device of a group.
    fn device(&self, group: &str, address: &str, class: &str, driver: &str) {
        let folder = format!("sys/devices/pci0000:00/{address}");
        self.file(&format!("{folder}/class"), class);
        self.link(&format!("{folder}/subsystem"), "../../../bus/pci");
        self.link(&format!("{folder}/driver"), &format!("../../../bus/pci/drivers/{driver}"));
        let link = format!("../../../../devices/pci0000:00/{address}");
        self.link(&format!("sys/kernel/iommu_groups/{group}/devices/{address}"), &link);
        self.file(&format!("sys/kernel/iommu_groups/{group}/type"), "DMA\n");
        if driver.starts_with("vfio") {
            self.file(&format!("dev/vfio/{group}"), "");
        }
    }

    fn doctor(&self, arguments: &[&str]) -> Ended {
        let root = self.root.to_str().unwrap();
        self.place.run(&[&["doctor", "--root", root], arguments].concat())
    }

    /// The same, as JSON, which must agree with the exit status.
    fn json(&self, arguments: &[&str]) -> Value {
        parse(&self.doctor(&[arguments, &["--json", "-"]].concat()))
    }
}

fn parse(ended: &Ended) -> Value {
    let json: Value = serde_json::from_str(&ended.out)
        .unwrap_or_else(|error| panic!("standard output is not JSON: {error}\n{ended}"));
    assert_eq!(json["schema"], "ringfence.doctor/1");
    let ready = json["ready"].as_object().unwrap().values().all(|ready| *ready == true);
    assert_eq!(ended.code(), if ready { 0 } else { 1 }, "{ended}");
    json
}

/// The state of a check; `none`: it was not made.
fn state<'a>(json: &'a Value, name: &str) -> &'a str {
    let checks = json["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["name"] == name);
    found.map_or("none", |check| check["state"].as_str().unwrap())
}

fn commands(json: &Value, name: &str) -> Vec<String> {
    let checks = json["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == name).unwrap();
    let remedies = check["remedies"].as_array().unwrap().iter();
    let commands = remedies.flat_map(|remedy| remedy["commands"].as_array().unwrap());
    commands.map(|command| command.as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_report_and_the_exit_status_agree_about_this_host() {
    let place = Place::new();
    let json = parse(&place.run(&["doctor", "--json", "-"]));
    for purpose in ["vfio", "pin", "vhost-user"] {
        assert!(json["ready"][purpose].is_boolean(), "{json}");
    }
    for key in
        ["host", "memory", "checks", "memlock", "huge_pages", "iommu", "vfio", "groups", "calls"]
    {
        assert!(!json[key].is_null(), "{key} is missing\n{json}");
    }
    // Back ends can run wherever these tests run.
    assert_eq!(state(&json, "io-uring"), "ok", "{json}");
    assert_eq!(state(&json, "memfd"), "ok", "{json}");
    assert!(["ok", "warning"].contains(&state(&json, "sandbox")), "{json}");
    // Every lack comes with a remedy.
    for check in json["checks"].as_array().unwrap() {
        let helpless = check["remedies"].as_array().unwrap().is_empty();
        assert!(check["state"] != "lack" || !helpless, "{check}");
    }

    let ended = place.run(&["doctor", "--json", "file.json"]);
    assert_eq!(ended.code(), if json["ready"]["vfio"] == true { 0 } else { 1 }, "{ended}");
    assert!(ended.out.contains("memlock") && ended.out.contains("\nvhost-user"), "{ended}");
    let written: Value = serde_json::from_str(&place.read("file.json")).unwrap();
    assert_eq!(written["schema"], "ringfence.doctor/1");
}

#[test]
fn a_host_with_a_half_bound_group_becomes_ready_by_the_printed_commands() {
    let host = Host::server();
    host.device("3", "0000:00:1c.0", "0x060400\n", "pcieport");
    host.device("3", "0000:03:00.0", "0x010802\n", "vfio-pci");
    host.device("3", "0000:03:00.1", "0x010802\n", "nvme");
    let json = host.json(&["--for", "vfio"]);
    assert_eq!(state(&json, "group-3"), "lack", "{json}");
    assert_eq!(state(&json, "iommu"), "ok", "{json}");
    assert_eq!(state(&json, "interrupt-remapping"), "ok", "{json}");
    // Do what the commands say.
    let printed = commands(&json, "group-3");
    assert_eq!(
        printed,
        [
            "echo vfio-pci > /sys/bus/pci/devices/0000:03:00.1/driver_override",
            "echo 0000:03:00.1 > /sys/bus/pci/devices/0000:03:00.1/driver/unbind",
            "echo 0000:03:00.1 > /sys/bus/pci/drivers_probe",
        ]
    );
    host.device("3", "0000:03:00.1", "0x010802\n", "vfio-pci");
    let json = host.json(&["--for", "vfio"]);
    assert_eq!(json["ready"]["vfio"], true, "{json}");
    let ended = host.doctor(&["--for", "vfio", "--device", "0000:03:00.1"]);
    assert_eq!(ended.code(), 0, "{ended}");
    assert!(ended.out.contains("ready"), "{ended}");
    assert_eq!(host.doctor(&["--device", "0000:0f:00.0"]).code(), 1);
}

#[test]
fn a_host_without_an_iommu_lacks_it_and_only_vfio_minds() {
    let host = Host::bare();
    host.limits("unlimited");
    host.file("sys/class/x", "");
    host.file("sys/kernel/x", "");
    host.file("sys/firmware/acpi/tables/DMAR", "");
    host.file("proc/cpuinfo", "vendor_id\t: GenuineIntel\nflags\t\t: fpu\n");
    let json = host.json(&[]);
    assert_eq!(state(&json, "iommu"), "lack", "{json}");
    assert!(commands(&json, "iommu").concat().contains("intel_iommu=on"), "{json}");
    assert_eq!(json["ready"]["vfio"], false, "{json}");
    assert_eq!(json["ready"]["pin"], true, "{json}");
    assert_eq!(host.doctor(&["--for", "pin"]).code(), 0);
    assert_eq!(host.doctor(&["--for", "vhost-user"]).code(), 0);
}

#[test]
fn memory_is_counted_against_what_is_wanted() {
    let host = Host::bare();
    host.limits("8388608");
    assert_eq!(host.doctor(&["--for", "pin", "--memory", "8m"]).code(), 0);
    let json = host.json(&["--for", "pin", "--memory", "1g"]);
    assert_eq!(state(&json, "memlock"), "lack", "{json}");
    let printed = commands(&json, "memlock").join("\n");
    for remedy in ["--memlock=1073741824:1073741824", "LimitMEMLOCK=1048576K", "cap_ipc_lock"] {
        assert!(printed.contains(remedy), "{remedy}\n{printed}");
    }
}

#[test]
fn a_container_of_which_nothing_is_seen_is_not_called_ready() {
    let host = Host::bare();
    let json = host.json(&[]);
    assert_eq!(state(&json, "iommu"), "unknown", "{json}");
    assert_eq!(state(&json, "memlock"), "unknown", "{json}");
    assert_eq!(json["ready"]["vfio"], false, "{json}");
    assert_eq!(json["ready"]["pin"], false, "{json}");
}

#[test]
fn a_host_without_protection_is_reported_first_and_loudly() {
    let host = Host::server();
    host.device("1", "0000:03:00.0", "0x010802\n", "vfio-pci");
    host.file("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n");
    host.file("dev/vfio/noiommu-0", "");
    let ended = host.doctor(&["--for", "vfio"]);
    let first = ended.out.lines().nth(2).unwrap();
    assert!(first.starts_with("WARNING") && first.contains("REACH ALL MEMORY"), "{ended}");
}

#[test]
fn garbage_wherever_it_may_stand_stops_nothing() {
    let garbage: &[&[u8]] =
        &[b"", b"\n\n", b"\xff\xfe\x00\x1b[31m", b"-1", &[b'9'; 5000], b"[ [ ] ]"];
    let files = [
        "proc/self/limits",
        "proc/self/status",
        "proc/self/uid_map",
        "proc/self/mountinfo",
        "proc/swaps",
        "proc/1/status",
        "proc/cmdline",
        "proc/cpuinfo",
        "proc/interrupts",
        "proc/sys/kernel/osrelease",
        "proc/sys/kernel/io_uring_disabled",
        "sys/class/iommu/dmar0",
        "sys/kernel/iommu_groups/1/name",
        "sys/kernel/iommu_groups/2/devices",
        "sys/kernel/iommu_groups/3/devices/0000:00:00.0/class",
        "sys/kernel/iommu_groups/3/devices/0000:00:00.0/driver",
        "sys/kernel/mm/hugepages/hugepages-18446744073709551615kB/nr_hugepages",
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
        "sys/kernel/mm/transparent_hugepage/enabled",
        "sys/module/vfio/parameters/enable_unsafe_noiommu_mode",
        "sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
    ];
    for bytes in garbage {
        let host = Host::bare();
        files.iter().for_each(|name| host.file(name, bytes));
        host.link("sys/kernel/iommu_groups/4/devices/loop", "loop");
        host.link("sys/class/block/sda", "sda");
        let ended = host.doctor(&["--for", "vfio"]);
        assert_eq!(ended.code(), 1, "{ended}");
        assert_eq!(ended.err, "", "{ended}");
        assert!(!ended.out.contains('\u{1b}'), "{ended}");
        host.json(&[]);
    }
}

#[test]
fn wrong_usage_is_refused() {
    let place = Place::new();
    place.run(&["doctor", "--for", "fun"]).refused(&["fun", "vhost-user"]);
    place.run(&["doctor", "--memory", "lots"]).refused(&["--memory", "lots"]);
    place
        .run(&["doctor", "--for", "pin", "--device", "0000:01:00.0"])
        .refused(&["--device", "vfio"]);
    place.run(&["doctor", "--root", "nowhere"]).refused(&["nowhere"]);
    place.run(&["doctor", "--json", "nowhere/x"]).refused(&["nowhere/x"]);
}
