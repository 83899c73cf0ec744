//! The description of the machine: QEMU's arguments and the table for the guest; and refused
//! arguments.

use serde_json::Value;

use crate::{common::Place, rig::started};

fn place() -> Place {
    let place = Place::new();
    for name in ["a.img", "b.img"] {
        place.write(name, vec![0; 4096]);
    }
    place
}

/// The complete standard output.
fn output(place: &Place, arguments: &[&str]) -> String {
    let running = started(place, arguments);
    running.signal(rustix::process::Signal::TERM);
    let ended = running.wait();
    assert_eq!(ended.code(), 0, "{ended}");
    ended.out
}

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

#[test]
fn the_table_names_the_iommu_and_each_endpoint() {
    let place = place();
    let all = ["--blk", "a=a.img", "--blk", "b=b.img,addr=10.1", "--net", "n=peer:p"];
    let more = ["--slot", "8", "--idle", "1e", "--viot", "table"];
    let text = output(&place, &[&all[..], &more, &["--json"]].concat());
    let description: Value = serde_json::from_str(&text).unwrap();
    let table = std::fs::read(place.path("table")).unwrap();
    assert_eq!(&table[..4], b"VIOT");
    assert_eq!(le(&table[4..8]) as usize, table.len());
    assert_eq!(table.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte)), 0);

    // From node to node, as a guest reads it.
    let (mut at, mut nodes) = (le(&table[38..40]) as usize, Vec::new());
    for _ in 0..le(&table[36..38]) {
        let len = le(&table[at + 2..at + 4]) as usize;
        nodes.push((at, table[at], &table[at..at + len]));
        at += len;
    }
    assert_eq!(at, table.len());
    let (iommu_at, kind, iommu) = nodes[0];
    assert_eq!((kind, le(&iommu[4..6]), le(&iommu[6..8])), (3, 0, 0x40));
    let mut endpoints = Vec::new();
    for (_, kind, node) in &nodes[1..] {
        assert_eq!((*kind, le(&node[8..12]), le(&node[16..18])), (1, 0, iommu_at as u64));
        assert_eq!(node[12..14], node[14..16]);
        // The number of an endpoint is that of its function.
        assert_eq!(le(&node[4..8]), le(&node[12..14]));
        endpoints.push(le(&node[4..8]));
    }
    assert_eq!(endpoints, [0x48, 0x81, 0x50, 0x58, 0xf0]);

    let devices = description["devices"].as_array().unwrap();
    let of = |key: &str| devices.iter().map(|device| device[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("endpoint"), endpoints);
    assert_eq!(of("address"), ["09.0", "10.1", "0a.0", "0b.0", "1e.0"]);
    assert_eq!(of("kind"), ["blk", "blk", "net", "net", "idle"]);
    assert_eq!(description["kernel"], serde_json::json!(["intel_iommu=off"]));
    assert_eq!(description["viot"], place.path("table").to_str().unwrap());
}

#[test]
fn the_arguments_are_one_a_line_and_the_same_as_json() {
    let place = place();
    let all = ["--blk", "a=a.img,queues=2", "--net", "it's a net=loopback"];
    let text = output(&place, &all);
    let description: Value =
        serde_json::from_str(&output(&place, &[&all[..], &["--json"]].concat())).unwrap();
    let mut words = Vec::new();
    for line in text.lines() {
        let (option, value) = line.split_once(' ').unwrap();
        assert!(option.starts_with('-'), "{line}");
        words.push(option.to_owned());
        // As a shell reads it.
        words.push(value.replace(r"'\''", "\0").replace('\'', "").replace('\0', "'"));
    }
    assert_eq!(description["qemu"], serde_json::json!(words));
    let has = |part: &str| assert!(words.iter().any(|word| word.contains(part)), "{part}\n{text}");
    has("virtio-id=23,num_vqs=2,config_size=40,addr=05.0");
    has("intel-iommu,intremap=off,device-iotlb=on");
    has("num-queues=2,disable-legacy=on,iommu_platform=on,addr=06.0");
    has("size=16M,share=on");
    has(&format!("path={}", place.path("it's a net").display()));
    has(&format!("file={}", place.path("i.viot").display()));
    // When a paused guest continues, QEMU starts devices in this order.
    let place_of = |part: &str| words.iter().position(|word| word.contains(part)).unwrap();
    assert!(place_of("virtio-id=23") < place_of("vhost-user-blk-pci"));
}

#[test]
fn contradictory_options_are_refused() {
    let place = place();
    let refused = |arguments: &[&str], words: &[&str]| {
        place.run(&[&["guard", "--iommu", "i"], arguments].concat()).refused(words);
    };
    place.run(&["guard", "--blk", "a=a.img"]).refused(&["--iommu"]);
    refused(&[], &["--blk", "--net"]);
    refused(&["--blk", "a.img"], &["SOCKET="]);
    refused(&["--blk", "a=a.img,fast"], &["fast", "read-only"]);
    refused(&["--blk", "a=a.img", "--blk", "a=b.img"], &["given twice"]);
    refused(&["--blk", "i=a.img"], &["given twice"]);
    refused(&["--blk", "a=a.img,addr=6", "--blk", "b=b.img,addr=6"], &["06.0"]);
    refused(&["--blk", "a=a.img,addr=5"], &["05.0"]);
    refused(&["--blk", "a=a.img,addr=1f"], &["1f"]);
    refused(&["--blk", "a=a.img", "--slot", "5.1"], &["--slot"]);
    refused(&["--blk", "a=a.img", "--slot", "1e"], &["too many"]);
    refused(&["--net", "n=bridge:br0"], &["bridge:br0", "tap:NAME"]);
    refused(&["--blk", "a=a.img", "--memory", "1000"], &["16 MiB"]);
    refused(&["--blk", "a=a.img", "--hole", "0-fffff"], &["anyway"]);
    refused(&["--blk", "a=a.img", "--max-domains", "0"], &["max-domains"]);
    refused(&["--blk", "a=/dev/null"], &["neither a file"]);
    let missing = place.run(&["guard", "--iommu", "i", "--blk", "a=nowhere.img"]);
    assert_eq!(missing.code(), 1, "{missing}");
    // Nothing is left of them.
    assert_eq!(place.names(), ["a.img", "b.img"]);
}
