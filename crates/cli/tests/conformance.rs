//! `ringfence conformance` against a virtio-iommu in another process: this one.

mod common;

use std::{
    os::{fd::AsFd, unix::net::UnixListener},
    path::PathBuf,
    sync::Arc,
    thread,
};

use common::{Ended, Place};
use ringfence_devices::{
    blk::{Blk, BlkOptions},
    disk::{Disk, Ram},
    iommu::{Endpoints, Iommu, IommuBackend, IommuOptions},
};
use ringfence_iommu::{
    Geometry, Iova, PageSizes, Range, ReservedKind, ReservedRegion, shootdown::Shootdown,
    table::Limits,
};
use ringfence_iotlb::{Binding, Endpoint};
use ringfence_mem::Memory;
use ringfence_run::{
    PeerFd,
    worker::{Notify, Worker},
};
use ringfence_vhost_user::{ConfigWrite, Handler, HandlerError, Offer, RingSetup, Server};
use ringfence_virtio_iommu::device::DeviceConfig;
use serde_json::Value;

/// The endpoints behind the IOMMU; each is a disk.
const ENDPOINTS: [u32; 2] = [0x30, 0x38];

/// Serves a virtio-iommu at `iommu.sock` of a place, made by `made`, and a disk for each endpoint
/// at `disk-N.sock`.
fn serve<H: Handler + Send + 'static>(place: &Place, made: impl FnOnce(IommuBackend) -> H) {
    let workers: Arc<[Worker]> =
        [Worker::spawn("worker", Notify::Adaptive).expect("a worker")].into();
    let shootdown = Shootdown::new(8);
    let endpoints = ENDPOINTS.map(|id| Endpoint::new(id, Arc::clone(&shootdown), Binding::Blocked));
    let region = |first, last, kind| {
        let range = Range::new(Iova(first), Iova(last)).expect("a range");
        ReservedRegion { range, kind }
    };
    let reserved = [
        region(0xfee0_0000, 0xfeef_ffff, ReservedKind::Msi),
        region(0x4000_0000, 0x4000_ffff, ReservedKind::Reserved),
    ];
    let input_range = Range::new(Iova(0x1000), Iova((1 << 40) - 1)).expect("a range");
    let page_sizes = PageSizes::from_granule(4096).expect("a power of two");
    let geometry = Geometry { reserved: reserved.into(), ..Geometry::new(page_sizes, input_range) };
    let behind = Endpoints::new(endpoints.clone(), shootdown, geometry, Limits::NONE);
    let device =
        DeviceConfig { page_sizes, input_range, domain_range: (1, 64), ..DeviceConfig::default() };
    let options = IommuOptions { device, unit: 0 };
    let iommu = Iommu::new(Arc::new(behind), options, Arc::clone(&workers)).connect();
    listen(place.path("iommu.sock"), made(iommu));
    for (n, endpoint) in endpoints.into_iter().enumerate() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("room for a disk");
        let disk = Disk::Ram(Arc::new(Ram::map(file.as_fd(), 1 << 20).expect("a disk")));
        let unit = n as u32 + 1;
        let options =
            BlkOptions { endpoint: Some(endpoint), unit, ..BlkOptions::new(disk, "disk", 1) };
        let backend = Blk::backend(options, Arc::clone(&workers));
        listen(place.path(&format!("disk-{n}.sock")), backend);
    }
}

/// Serves one front end after the other at a socket, for as long as this process lives.
fn listen<H: Handler + Send + 'static>(socket: PathBuf, mut handler: H) {
    let listener = UnixListener::bind(socket).expect("a socket");
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let mut server = Server::new(stream, handler);
            let _ = server.serve();
            handler = server.into_handler();
        }
    });
}

/// A device with deviations.
struct Wrong {
    inner: IommuBackend,
    /// The value that the field `bypass` reads as.
    bypass: Option<u8>,
    /// Whether requests are left unserved.
    deaf: bool,
}

impl Handler for Wrong {
    fn offer(&self) -> Offer {
        self.inner.offer()
    }
    fn set_features(&mut self, features: u64) -> Result<(), HandlerError> {
        self.inner.set_features(features)
    }
    fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), HandlerError> {
        self.inner.set_memory(memory)
    }
    fn start_ring(&mut self, ring: u16, setup: RingSetup) -> Result<(), HandlerError> {
        self.inner.start_ring(ring, setup)
    }
    fn stop_ring(&mut self, ring: u16) -> Result<u32, HandlerError> {
        self.inner.stop_ring(ring)
    }
    fn enable_ring(&mut self, ring: u16, enabled: bool) -> Result<(), HandlerError> {
        self.inner.enable_ring(ring, enabled && !self.deaf)
    }
    fn set_call(&mut self, ring: u16, call: Option<PeerFd>) -> Result<(), HandlerError> {
        self.inner.set_call(ring, call)
    }
    fn config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), HandlerError> {
        self.inner.config(offset, out)?;
        let at = 36u32.checked_sub(offset).and_then(|at| out.get_mut(at as usize));
        if let (Some(byte), Some(bypass)) = (at, self.bypass) {
            *byte = bypass;
        }
        Ok(())
    }
    fn set_config(
        &mut self,
        offset: u32,
        why: ConfigWrite,
        data: &[u8],
    ) -> Result<(), HandlerError> {
        self.inner.set_config(offset, why, data)
    }
    fn reset(&mut self) -> Result<(), HandlerError> {
        self.inner.reset()
    }
}

fn conformance(place: &Place, more: &[&str]) -> Ended {
    let mut arguments = vec!["conformance", "iommu.sock", "--endpoint", "0x30"];
    // What comes may take its time: an access, too, which gets a tenth of the time-out. Only what
    // is to be refused is not waited for that long.
    if !more.contains(&"--timeout") {
        arguments.extend(["--timeout", "600000"]);
    }
    arguments.extend(more);
    place.run(&arguments)
}

fn json(place: &Place, more: &[&str]) -> (Ended, Value) {
    let ended = conformance(place, &[more, &["--json", "-"]].concat());
    let found = serde_json::from_str(&ended.out).unwrap_or_else(|error| panic!("{error}: {ended}"));
    (ended, found)
}

/// The checks that ended this way.
fn ended_as<'a>(found: &'a Value, outcome: &str) -> Vec<&'a str> {
    let rules = found["rules"].as_array().expect("rules").iter();
    let those = rules.filter(|row| row["outcome"] == outcome);
    those.map(|row| row["check"].as_str().expect("a name")).collect()
}

const WITH_DISKS: [&str; 6] =
    ["--endpoint", "0x38", "--blk", "disk-0.sock", "--blk", "disk-1.sock"];

#[test]
fn our_own_device_conforms_to_the_letter_in_another_process() {
    let place = Place::new();
    serve(&place, |iommu| iommu);
    let (ended, found) = json(&place, &[&WITH_DISKS[..], &["--strict"]].concat());
    assert_eq!(ended.code(), 0, "{ended}");
    assert_eq!(found["schema"], "ringfence.conformance/1");
    assert_eq!(found["conforms"], true);
    assert_eq!(ended_as(&found, "fail"), [""; 0]);
    assert_eq!(ended_as(&found, "not run"), [""; 0]);
    let cannot = [
        "bypass-system-reset",
        "bypass-negotiated",
        "map-mmio-unoffered",
        "probe-unoffered",
        "needs-reset",
    ];
    assert_eq!(ended_as(&found, "not applicable"), cannot);
    // A second run finds the same as the first: nothing is left behind.
    let (_, again) = json(&place, &[&WITH_DISKS[..], &["--strict"]].concat());
    assert_eq!(found, again);
}

#[test]
fn without_a_disk_accesses_are_reported_as_not_applicable() {
    let place = Place::new();
    serve(&place, |iommu| iommu);
    let ended = conformance(&place, &[]);
    assert_eq!(ended.code(), 0, "{ended}");
    for part in ["no access can be tried", "it takes 2 endpoints", "\nconforms\n", "V22", "should"]
    {
        assert!(ended.out.contains(part), "{part} in {ended}");
    }
    let (_, found) = json(&place, &["--only", "V22,23"]);
    assert_eq!(ended_as(&found, "not applicable"), ["unmap-out-of-reach"]);
    assert!(
        found["rules"]
            .as_array()
            .unwrap()
            .iter()
            .all(|row| { row["rule"] == "V22" || row["rule"] == "V23" })
    );
}

#[test]
fn a_wrong_device_is_found_out() {
    let place = Place::new();
    serve(&place, |inner| Wrong { inner, bypass: Some(2), deaf: false });
    let (ended, found) = json(&place, &["--endpoint", "0x38"]);
    assert_eq!(ended.code(), 1, "{ended}");
    let failed = ["bypass-zero-or-one", "bypass-written", "bypass-survives-reset"];
    assert_eq!(ended_as(&found, "fail"), failed);
    assert_eq!(found["counts"]["must_fail"], 2);
    let row = &found["rules"].as_array().unwrap()[5];
    assert_eq!((&row["rule"], &row["level"]), (&"V3".into(), &"must".into()));
    assert_eq!(row["mismatch"]["came"], "2");
    let text = conformance(&place, &["--only", "V3"]);
    assert_eq!(text.code(), 1, "{text}");
    assert!(text.out.contains("FAIL    V3") && text.out.ends_with("does not conform\n"), "{text}");
}

#[test]
fn a_device_that_never_replies_fails_in_good_time() {
    let place = Place::new();
    serve(&place, |inner| Wrong { inner, bypass: None, deaf: true });
    let (ended, found) = json(&place, &["--timeout", "20"]);
    assert_eq!(ended.code(), 1, "{ended}");
    let failed = ended_as(&found, "fail");
    assert!(failed.contains(&"success-is-ok") && failed.contains(&"map-backwards"), "{failed:?}");
    assert_eq!(ended_as(&found, "not run"), [""; 0]);
    assert!(ended.out.contains("the device did not reply"), "{ended}");
}

#[test]
fn wrong_usage_and_an_absent_device_are_distinguished() {
    let place = Place::new();
    place.run(&["conformance"]).refused(&["--endpoint"]);
    place.run(&["conformance", "iommu.sock"]).refused(&["--endpoint"]);
    conformance(&place, &["--endpoint", "48"]).refused(&["--endpoint 48", "twice"]);
    conformance(&place, &["--absent", "0x30"]).refused(&["--absent 48"]);
    conformance(&place, &["--only", "V31"]).refused(&["V31", "no check"]);
    conformance(&place, &["--only", "L3"]).refused(&["L3", "V1 to V30"]);
    conformance(&place, &["--blk", "a", "--blk", "b"]).refused(&["2 disks for 1 endpoint"]);
    let ended = conformance(&place, &[]);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("iommu.sock") && ended.out.is_empty(), "{ended}");
    serve(&place, |iommu| iommu);
    let ended = conformance(&place, &["--blk", "nowhere.sock"]);
    assert_eq!(ended.code(), 1, "{ended}");
    assert!(ended.err.contains("nowhere.sock"), "{ended}");
}
