//! A virtio-iommu that outlives its process.

use ringfence_mem::SharedFile;
use ringfence_virtio_iommu::device::{Backing, Journal, JournalError};

use super::{
    Iommu,
    device::{Requests, State},
};

/// The values of the journal's note, the state of the request queue. The upper half is where it was
/// stopped.
const RESET: u64 = 0;
const RUNS: u64 = 1;
const STOPPED: u64 = 2;

fn note_of(requests: Requests) -> u64 {
    match requests {
        Requests::Reset => RESET,
        Requests::Running | Requests::Left => RUNS,
        Requests::Stopped(at) => STOPPED | u64::from(at) << 32,
    }
}

/// What a process has left that noted this; of bytes that are wrong, nothing.
fn left_by(note: u64) -> Requests {
    // The upper half.
    let at = (note >> 32) as u32;
    match note & u64::from(u32::MAX) {
        RUNS => Requests::Left,
        STOPPED => Requests::Stopped(at),
        _ => Requests::Reset,
    }
}

fn lost(error: &JournalError) {
    tracing::warn!(source = %"iommu", "should this process die, its guest has to be reset: {error}");
}

impl Iommu {
    /// How many bytes the file of a journal needs for at most `mappings`, in all domains together,
    /// and the endpoints that there are now.
    pub fn journal_bytes(&self, mappings: u64) -> usize {
        Journal::bytes_for(mappings, self.device.backing().endpoints().len())
    }

    /// Keeps in `file` all that another process needs to go on with the guest, should this one die. To be called
    /// before a front end connects.
    ///
    /// # Errors
    /// The file is too short ([`JournalError::Short`], [`JournalError::Full`]).
    pub fn keep_in(&self, file: SharedFile) -> Result<(), JournalError> {
        self.device.set_journal(Journal::new(file)?, lost)
    }

    /// Goes on from the state that an earlier process [kept](Self::keep_in) in `file`, and keeps it
    /// there from now on. To be called before a front end connects, and only if that process's
    /// connection goes on: if its request queue ran, the next one to start is taken for it. Until a
    /// front end connects all endpoints are blocked.
    ///
    /// # Errors
    /// See [`JournalError`]. The IOMMU is as after a reset.
    pub fn recover(&self, file: SharedFile) -> Result<(), JournalError> {
        let (journal, recovered) = Journal::open(file)?;
        let mut state = self.state.lock();
        self.device.recover(&recovered)?;
        let (note, requests) = (recovered.note(), recovered.requests());
        // The recovered state holds even if the next process cannot get it.
        self.device.set_journal(journal, lost).unwrap_or_else(|error| lost(&error));
        state.requests = left_by(note);
        state.completed = recovered.into_completions();
        let domains = self.device.domains();
        let mappings = self.device.backing().mappings();
        tracing::info!(
            source = %"iommu",
            "goes on with {mappings} mappings in {domains} domains, the last {requests} requests done again"
        );
        Ok(())
    }

    /// Hands the guest over to another process, in an orderly way. To be called before rings are
    /// stopped: their stop, and the end of front ends, is not written to the journal any more.
    pub fn hand_over(&self) {
        self.state.lock().handed_over = true;
    }

    /// Something becomes of the request queue.
    pub(super) fn note(&self, state: &mut State, requests: Requests) {
        state.requests = requests;
        if !state.handed_over {
            self.device.note_in_journal(note_of(requests));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::OwnedFd, sync::Arc, thread, time::Duration};

    use ringfence_iommu::{Geometry, Iova, PageSizes, Range, shootdown::Shootdown, table::Limits};
    use ringfence_iotlb::{Binding, Endpoint};
    use ringfence_mem::{GuestRam, Memory};
    use ringfence_run::{
        PeerFd, event,
        worker::{Notify, Worker},
    };
    use ringfence_vhost_user::{Handler, RingAddresses, RingSetup};
    use ringfence_virtio_iommu::{
        device::DeviceConfig,
        wire::{AttachFlags, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, Status},
    };
    use ringfence_virtq::{Desc, F_VERSION_1, driver, layout};

    use super::*;
    use crate::iommu::{Endpoints, IommuBackend, IommuOptions};

    const SIZE: u16 = 4;

    /// A guest with a request queue, and the file that its IOMMU is kept in.
    struct Guest {
        ram: Arc<GuestRam>,
        driver: driver::Queue,
        kick: OwnedFd,
        journal: OwnedFd,
        len: u64,
    }

    /// A process.
    struct Process {
        iommu: Arc<Iommu>,
        endpoint: Arc<Endpoint>,
        backend: Option<IommuBackend>,
    }

    fn iommu() -> Process {
        let shootdown = Shootdown::new(2);
        let endpoint = Endpoint::new(1, Arc::clone(&shootdown), Binding::Blocked);
        let geometry = Geometry::new(PageSizes::X86, Range::ALL);
        let endpoints = Endpoints::new([Arc::clone(&endpoint)], shootdown, geometry, Limits::NONE);
        let options = IommuOptions { device: DeviceConfig::default(), unit: 0 };
        let workers = Arc::new([Worker::spawn("test", Notify::Sleep).unwrap()]);
        let iommu = Iommu::new(Arc::new(endpoints), options, workers);
        Process { iommu, endpoint, backend: None }
    }

    impl Guest {
        fn new() -> (Guest, Process) {
            let process = iommu();
            let len = process.iommu.journal_bytes(100);
            let (file, journal) = SharedFile::create(len).unwrap();
            process.iommu.keep_in(file).unwrap();
            let ram = GuestRam::new(0x4000, 0).unwrap();
            let driver = Guest::ring(&ram);
            (Guest { ram, driver, kick: event::new().unwrap(), journal, len: len as u64 }, process)
        }

        fn ring(ram: &Arc<GuestRam>) -> driver::Queue {
            let config = driver::QueueConfig { size: SIZE, event_idx: false, packed: false };
            let window = ram.window(0, layout::offsets(SIZE).len).unwrap();
            let rings = driver::Rings::placed(&window, &config).unwrap();
            driver::Queue::with_config(config, rings).unwrap()
        }

        /// The next process, which nothing has connected to.
        fn successor(&self) -> Process {
            let process = iommu();
            process.iommu.recover(SharedFile::map(&self.journal, 0, self.len).unwrap()).unwrap();
            process
        }

        fn connect(&self, process: &mut Process, base: Option<u32>) {
            let mut backend = process.iommu.connect();
            let features = process.iommu.device.features().bits();
            backend.set_features(features | F_VERSION_1).unwrap();
            backend.set_memory(Memory::of_ram(&self.ram).unwrap()).unwrap();
            let at = layout::offsets(SIZE);
            let [desc, avail, used] =
                [at.desc, at.avail, at.used].map(|at| self.ram.user_addr() + at as u64);
            let addresses = RingAddresses { desc, avail, used, log: None };
            let kick = Some(PeerFd::from(self.kick.try_clone().unwrap()));
            let setup = RingSetup {
                size: SIZE,
                addresses,
                base,
                kick,
                enabled: true,
                resumed: base.is_none(),
            };
            backend.start_ring(0, setup).unwrap();
            process.backend = Some(backend);
        }

        fn publish(&mut self, request: Request) {
            let mut bytes = [0; MAX_REQUEST_LEN];
            let len = request.emit(&mut bytes);
            self.ram.slice(0x1000, len).unwrap().copy_from(&bytes[..len]);
            let descs = [Desc::readable(0x1000, len as u32), Desc::writable(0x1100, 4)];
            self.driver.add(&descs, 0).unwrap();
            self.driver.publish();
            event::signal(&self.kick);
        }

        fn status(&mut self) -> u8 {
            for tried in 0.. {
                if self.driver.pop().unwrap().is_some() {
                    break;
                }
                assert!(tried < 20_000, "no completion");
                thread::sleep(Duration::from_millis(1));
            }
            let mut tail = [0xee; 4];
            self.ram.slice(0x1100, 4).unwrap().copy_to(&mut tail);
            tail[0]
        }

        fn send(&mut self, request: Request) -> u8 {
            self.publish(request);
            self.status()
        }
    }

    impl Process {
        /// Nothing that it does from here on is seen.
        fn dies(self) {
            self.iommu.device.leave_journal();
        }

        fn is_bound(&self) -> bool {
            matches!(self.endpoint.binding(), Binding::Domain(_))
        }
    }

    fn attach() -> Request {
        Request::Attach { domain: 1, endpoint: 1, flags: AttachFlags::empty() }
    }

    fn map(at: u64) -> Request {
        let range = Range::new(Iova(at), Iova(at + 0xfff)).unwrap();
        Request::Map(MapRequest { domain: 1, range, phys: 0, flags: MapFlags::READ })
    }

    const OK: u8 = Status::Ok as u8;
    const INVAL: u8 = Status::Inval as u8;

    #[test]
    fn after_a_death_the_request_queue_goes_on_or_there_is_a_new_driver() {
        // rule V4
        let (mut guest, mut process) = Guest::new();
        guest.connect(&mut process, Some(0));
        assert_eq!([attach(), map(0x1000)].map(|request| guest.send(request)), [OK, OK]);
        process.dies();
        // Twice, and once before any front end has come.
        guest.successor().dies();
        let mut process = guest.successor();
        assert!(!process.is_bound(), "no front end is there");
        process.iommu.client().ring_starts().unwrap();
        guest.publish(map(0x1000));
        guest.connect(&mut process, None);
        assert!(process.is_bound());
        assert_eq!(guest.status(), INVAL, "it is there");
        assert_eq!(guest.send(map(0x2000)), OK);
        process.dies();
        let mut process = guest.successor();
        guest.connect(&mut process, Some(4));
        assert_eq!([map(0x2000), map(0x3000)].map(|request| guest.send(request)), [INVAL, OK]);
        process.dies();
        let mut process = guest.successor();
        guest.connect(&mut process, None);
        // Another front end, with another driver.
        process.backend = None;
        guest.ram.slice(0, layout::offsets(SIZE).len).unwrap().fill_zero();
        guest.driver = Guest::ring(&guest.ram);
        guest.connect(&mut process, Some(0));
        assert_eq!((process.is_bound(), process.iommu.device.domains()), (false, 0));
        assert_eq!([attach(), map(0x1000)].map(|request| guest.send(request)), [OK, OK]);
        // When the front end ends, all state of its driver ends.
        drop(process);
        assert_eq!(guest.successor().iommu.device.domains(), 0);
    }

    #[test]
    fn what_is_handed_over_goes_on_and_what_was_stopped_before_is_stopped() {
        let (mut guest, mut process) = Guest::new();
        guest.connect(&mut process, Some(0));
        assert_eq!([attach(), map(0x1000)].map(|request| guest.send(request)), [OK, OK]);
        process.iommu.hand_over();
        let base = process.backend.as_mut().unwrap().stop_ring(0).unwrap();
        drop(process);
        let mut process = guest.successor();
        process.iommu.client().ring_starts().unwrap();
        guest.connect(&mut process, Some(base));
        assert_eq!([map(0x1000), map(0x2000)].map(|request| guest.send(request)), [INVAL, OK]);
        let base = process.backend.as_mut().unwrap().stop_ring(0).unwrap();
        process.dies();
        // A paused guest goes on; if a device starts a ring first, the guest was reset.
        let mut process = guest.successor();
        guest.connect(&mut process, Some(base));
        assert_eq!(process.iommu.device.domains(), 1);
        process.backend.as_mut().unwrap().stop_ring(0).unwrap();
        process.dies();
        let process = guest.successor();
        process.iommu.client().ring_starts().unwrap();
        assert_eq!(process.iommu.device.domains(), 0);
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        for requests in [Requests::Reset, Requests::Left, Requests::Stopped(u32::MAX)] {
            assert!(left_by(note_of(requests)) == requests);
        }
        assert!(left_by(note_of(Requests::Running)) == Requests::Left);
        assert!([3, 1 << 31, u64::MAX].map(left_by) == [Requests::Reset; 3]);
    }
}
