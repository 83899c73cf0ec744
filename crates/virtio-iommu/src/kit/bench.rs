//! What checks are written in: requests, accesses, and what is expected of them.

use super::{ACCESS, Event, Failed, Mismatch, Refused, Subject};
use crate::wire::{
    AttachFlags, CONFIG_LEN, Features, MAX_REQUEST_LEN, MapFlags, Properties, Request, Status,
    TAIL_LEN,
};
use ringfence_iommu::{Iova, Range};

/// How a check ends: well, perhaps with something to note, or before its end.
pub(super) type Verdict = Result<Option<String>, Stop>;

/// Why a check ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The device does otherwise.
    Mismatch(Mismatch),
    /// It cannot be judged: why.
    NotApplicable(String),
    /// The device does not answer.
    Failed(Failed),
}

impl From<Failed> for Stop {
    fn from(failed: Failed) -> Stop {
        Stop::Failed(failed)
    }
}

pub(super) fn not_applicable<T>(why: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::NotApplicable(why.into()))
}

/// What unwritten bytes of a reply look like.
pub(super) const UNWRITTEN: u8 = 0xee;
/// What an endpoint writes, if it can choose.
const WRITTEN: u8 = 0xa5;
/// The kit's own pages, in guest memory and in each domain.
pub(super) const PAGES: u64 = 32;
/// The fields of the configuration that the kit reads, by their offsets.
const BYPASS: usize = 36;
/// How many of the last steps a report tells of.
const STEPS: usize = 8;

/// A reply.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) used: u32,
    pub(super) bytes: Vec<u8>,
}

impl Answer {
    /// Whether the buffer came back without a byte written.
    pub(super) fn is_unwritten(&self) -> bool {
        self.used == 0 && self.bytes.iter().all(|&byte| byte == UNWRITTEN)
    }

    /// The last bytes: status and reserved.
    pub(super) fn tail(&self) -> Option<[u8; TAIL_LEN]> {
        self.bytes.last_chunk().copied().filter(|_| self.used > 0)
    }

    pub(super) fn status(&self) -> Option<Status> {
        self.tail().and_then(|tail| Status::from_u8(tail[0]))
    }

    pub(super) fn is(&self, status: Status) -> bool {
        self.status() == Some(status)
    }
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.used, self.tail().map(|tail| tail[0])) {
            (0, _) if self.is_unwritten() => f.write_str("nothing written"),
            (0, _) => f.write_str("used length 0, but bytes written"),
            (_, Some(raw)) => match Status::from_u8(raw) {
                Some(status) => f.write_str(&name(status)),
                None => write!(f, "status {raw}"),
            },
            (used, None) => write!(f, "used length {used}"),
        }
    }
}

/// A status as the specification spells it.
pub(super) fn name(status: Status) -> String {
    format!("{status:?}").to_uppercase()
}

/// What an endpoint's access came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached {
    /// It was refused, and nothing of the kit's memory has changed.
    Nothing,
    /// Guest memory at this address.
    At(u64),
    /// It was allowed, and reached none of the kit's memory; or was refused and changed it.
    Elsewhere,
}

impl std::fmt::Display for Reached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Reached::Nothing => f.write_str("a refusal"),
            Reached::At(address) => write!(f, "guest memory at {address:#x}"),
            Reached::Elsewhere => f.write_str("an access elsewhere"),
        }
    }
}

/// A device under test, started, and what was done to it since.
pub(super) struct Bench<'a> {
    pub(super) subject: &'a mut dyn Subject,
    /// The features that the driver accepted.
    pub(super) features: Features,
    steps: Vec<String>,
    /// What `bypass` was at first.
    initial_bypass: Option<u8>,
    config: [u8; CONFIG_LEN],
    /// The kit's first page in each domain.
    base: u64,
    /// What PROBE told of, when the window was chosen.
    window_found: bool,
}

impl<'a> Bench<'a> {
    pub(super) fn new(subject: &'a mut dyn Subject) -> Bench<'a> {
        Bench {
            subject,
            features: Features::empty(),
            steps: Vec::new(),
            initial_bypass: None,
            config: [0; CONFIG_LEN],
            base: 0,
            window_found: false,
        }
    }

    /// What the device offers, of what is known.
    pub(super) fn offered(&self) -> Features {
        Features::from_bits_truncate(self.subject.offered())
    }

    /// What a driver would accept: all but the old BYPASS.
    pub(super) fn wanted(&self) -> Features {
        self.offered().difference(Features::BYPASS)
    }

    /// A reset, with all features, `bypass` zero where that can be.
    pub(super) fn restart(&mut self) -> Result<(), Failed> {
        self.steps.clear();
        self.start(self.wanted())?;
        self.subject.read_config(0, &mut self.config)?;
        if self.features.contains(Features::BYPASS_CONFIG) {
            self.initial_bypass.get_or_insert(self.config[BYPASS]);
            self.subject.write_config(BYPASS, &[0])?;
        }
        if !self.window_found {
            self.base = self.find_window()?;
            self.window_found = true;
            self.start(self.wanted())?;
        }
        self.steps.clear();
        self.tag_memory();
        Ok(())
    }

    /// A reset, after which the driver accepts `features`.
    pub(super) fn start(&mut self, features: Features) -> Result<(), Failed> {
        self.steps.push("reset".into());
        self.subject.start(features.bits())?;
        self.features = features;
        Ok(())
    }

    /// Leaves the device reset, and `bypass` as it was.
    pub(super) fn restore(&mut self) {
        if self.start(self.wanted()).is_ok()
            && let Some(bypass) = self.initial_bypass
        {
            let _ = self.subject.write_config(BYPASS, &[bypass]);
        }
    }

    /// What was done since the check began, for the report.
    pub(super) fn steps(&self) -> String {
        let from = self.steps.len().saturating_sub(STEPS);
        let begin = if from > 0 { "... " } else { "" };
        format!("{begin}{}", self.steps[from..].join(", "))
    }

    pub(super) fn note_step(&mut self, step: impl Into<String>) {
        self.steps.push(step.into());
    }

    /// The device did `came` where `expected` was asked for.
    pub(super) fn mismatch<T>(
        &self,
        came: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Result<T, Stop> {
        let (sent, came, expected) = (self.steps(), came.to_string(), expected.to_string());
        Err(Stop::Mismatch(Mismatch { sent, came, expected }))
    }

    /// Not applicable unless the driver has accepted `feature`.
    pub(super) fn needs(&self, feature: Features) -> Result<(), Stop> {
        match self.features.contains(feature) {
            true => Ok(()),
            false => not_applicable(format!("{} is not offered", feature_name(feature))),
        }
    }

    // The configuration.

    fn config_u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.config[at..at + 8].try_into().expect("eight bytes"))
    }

    fn config_u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.config[at..at + 4].try_into().expect("four bytes"))
    }

    pub(super) fn page_size_mask(&self) -> u64 {
        self.config_u64(0)
    }

    /// The lowest page size; a page where there is none.
    pub(super) fn granule(&self) -> u64 {
        match self.page_size_mask() {
            0 => 4096,
            mask => mask & mask.wrapping_neg(),
        }
    }

    /// The kit's page: a multiple of the granule in which accesses have room.
    pub(super) fn page(&self) -> u64 {
        self.granule().max(4096)
    }

    /// What can be mapped: first and last.
    pub(super) fn input_range(&self) -> (u64, u64) {
        match self.features.contains(Features::INPUT_RANGE) {
            true => (self.config_u64(8), self.config_u64(16)),
            false => (0, u64::MAX),
        }
    }

    /// The first and the last number of a domain.
    pub(super) fn domain_range(&self) -> (u32, u32) {
        match self.features.contains(Features::DOMAIN_RANGE) {
            true => (self.config_u32(24), self.config_u32(28)),
            false => (0, u32::MAX),
        }
    }

    pub(super) fn probe_size(&self) -> usize {
        self.config_u32(32) as usize
    }

    pub(super) fn read_bypass(&mut self) -> Result<u8, Stop> {
        let mut byte = [0];
        self.subject.read_config(BYPASS, &mut byte)?;
        let [byte] = byte;
        self.steps.push(format!("bypass reads {byte}"));
        Ok(byte)
    }

    pub(super) fn write_bypass(&mut self, value: u8) -> Result<(), Stop> {
        self.steps.push(format!("bypass = {value}"));
        Ok(self.subject.write_config(BYPASS, &[value])?)
    }

    // Numbers to work with.

    /// The endpoint of number `n`.
    pub(super) fn endpoint(&self, n: usize) -> Result<u32, Stop> {
        let endpoints = self.subject.endpoints();
        match endpoints.get(n) {
            Some(&endpoint) => Ok(endpoint),
            None => not_applicable(format!("it takes {} endpoints", n + 1)),
        }
    }

    /// A domain's number: that of the kit's domain `n`.
    pub(super) fn domain(&self, n: u32) -> Result<u32, Stop> {
        let (first, last) = self.domain_range();
        // Not the first one where there are enough: 0 is what forgotten fields hold.
        let from = if last.saturating_sub(first) > 8 { first + 1 } else { first };
        match from.checked_add(n).filter(|&domain| domain <= last) {
            Some(domain) => Ok(domain),
            None => not_applicable(format!("it takes {} domains", n + 1)),
        }
    }

    /// Addresses from the kit's page `first` to the end of its page `last`.
    pub(super) fn pages(&self, first: u64, last: u64) -> (u64, u64) {
        let page = self.page();
        (self.base + first * page, self.base + last * page + (page - 1))
    }

    /// Where the kit's page `n` of guest memory lies.
    pub(super) fn phys(&self, n: u64) -> u64 {
        let (first, _) = self.subject.memory();
        let page = self.page();
        first.next_multiple_of(page) + (n % PAGES) * page
    }

    /// A place for the kit's pages in every domain: its own memory's addresses if it may, so that
    /// what bypasses is not taken for what is refused.
    fn find_window(&mut self) -> Result<u64, Failed> {
        let page = self.page();
        let (first, last) = self.input_range();
        let mut taken: Vec<(u64, u64)> = self.subject.kept().into_iter().collect();
        for endpoint in self.subject.endpoints() {
            taken.extend(self.reserved(endpoint)?);
        }
        let free = |base: u64| {
            let end = base.checked_add(PAGES * page - 1)?;
            let blocked = taken.iter().filter(|&&(a, b)| a <= end && b >= base);
            Some((base, end, blocked.map(|&(_, b)| b).max()))
        };
        let own = self.phys(0);
        let mut base = first.checked_next_multiple_of(page).unwrap_or(first);
        if own >= first && matches!(free(own), Some((_, end, None)) if end <= last) {
            return Ok(own);
        }
        while let Some((at, _, Some(blocked))) = free(base) {
            match blocked.checked_add(1).and_then(|next| next.checked_next_multiple_of(page)) {
                Some(next) => base = next,
                None => return Ok(at),
            }
        }
        Ok(base)
    }

    /// The regions that PROBE tells of for an endpoint; none where it cannot be asked.
    pub(super) fn reserved(&mut self, endpoint: u32) -> Result<Vec<(u64, u64)>, Failed> {
        if !self.features.contains(Features::PROBE) {
            return Ok(Vec::new());
        }
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = Request::Probe { endpoint }.emit(&mut bytes);
        let size = self.probe_size();
        let mut reply = vec![UNWRITTEN; size + TAIL_LEN];
        self.subject.request(&bytes[..len], &mut reply)?;
        if reply[size] != Status::Ok as u8 {
            return Ok(Vec::new());
        }
        let regions = Properties::new(&reply[..size]).map(|property| property.region().range);
        Ok(regions.map(|range| (range.first().0, range.last().0)).collect())
    }

    // Requests.

    /// Sends bytes and gives the device room for `room`.
    pub(super) fn send(
        &mut self,
        what: impl Into<String>,
        readable: &[u8],
        room: usize,
    ) -> Result<Answer, Stop> {
        self.steps.push(what.into());
        let mut bytes = vec![UNWRITTEN; room];
        let used = self.subject.request(readable, &mut bytes)?;
        self.answered(Answer { used, bytes })
    }

    /// The same over descriptors of at most `piece` bytes.
    pub(super) fn send_split(
        &mut self,
        what: impl Into<String>,
        piece: usize,
        readable: &[u8],
        room: usize,
    ) -> Result<Answer, Stop> {
        self.steps.push(format!("{} in descriptors of {piece} bytes", what.into()));
        let mut bytes = vec![UNWRITTEN; room];
        match self.subject.request_split(piece, readable, &mut bytes) {
            None => not_applicable("requests cannot be split"),
            Some(used) => self.answered(Answer { used: used?, bytes }),
        }
    }

    fn answered(&mut self, answer: Answer) -> Result<Answer, Stop> {
        if let Some(step) = self.steps.last_mut() {
            step.push_str(&format!(": {answer}"));
        }
        if answer.used as usize > answer.bytes.len() {
            let (used, room) = (answer.used, answer.bytes.len());
            return self.mismatch(format!("used length {used}"), format!("at most {room}"));
        }
        Ok(answer)
    }

    /// Sends a request, after `change` to its bytes.
    pub(super) fn changed(
        &mut self,
        request: Request,
        what: &str,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<Answer, Stop> {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        change(&mut bytes[..len]);
        let what = match what {
            "" => describe(&request),
            what => format!("{} with {what}", describe(&request)),
        };
        self.send(what, &bytes[..len], TAIL_LEN)
    }

    pub(super) fn request(&mut self, request: Request) -> Result<Answer, Stop> {
        self.changed(request, "", |_| {})
    }

    pub(super) fn attach(&mut self, domain: u32, endpoint: u32) -> Result<Answer, Stop> {
        self.request(attach(domain, endpoint))
    }

    pub(super) fn attach_bypass(&mut self, domain: u32, endpoint: u32) -> Result<Answer, Stop> {
        let flags = AttachFlags::BYPASS;
        self.request(Request::Attach { domain, endpoint, flags })
    }

    pub(super) fn detach(&mut self, domain: u32, endpoint: u32) -> Result<Answer, Stop> {
        self.request(Request::Detach { domain, endpoint })
    }

    /// MAP, to read and to write.
    pub(super) fn map(&mut self, domain: u32, at: (u64, u64), phys: u64) -> Result<Answer, Stop> {
        self.request(map(domain, at, phys))
    }

    pub(super) fn unmap(&mut self, domain: u32, at: (u64, u64)) -> Result<Answer, Stop> {
        self.request(unmap(domain, at))
    }

    /// Expects one of the statuses.
    pub(super) fn expect(&self, answer: &Answer, statuses: &[Status]) -> Result<(), Stop> {
        if answer.status().is_some_and(|status| statuses.contains(&status)) {
            return Ok(());
        }
        let names: Vec<String> = statuses.iter().map(|&status| name(status)).collect();
        self.mismatch(answer, names.join(" or "))
    }

    /// Expects that a request is refused, however.
    pub(super) fn expect_refusal(&self, answer: &Answer) -> Result<(), Stop> {
        match answer.is(Status::Ok) {
            true => self.mismatch(answer, "a refusal"),
            false => Ok(()),
        }
    }

    /// What a check begins with and does not judge.
    pub(super) fn prepare(&self, answer: &Answer) -> Result<(), Stop> {
        match answer.is(Status::Ok) {
            true => Ok(()),
            false => not_applicable(format!("it begins with {}", self.steps())),
        }
    }

    /// An endpoint (the kit's number `n`) in the kit's domain `domain`: the numbers of both.
    pub(super) fn attached(&mut self, domain: u32, n: usize) -> Result<(u32, u32), Stop> {
        self.needs(Features::MAP_UNMAP)?;
        let (domain, endpoint) = (self.domain(domain)?, self.endpoint(n)?);
        let answer = self.attach(domain, endpoint)?;
        self.prepare(&answer)?;
        Ok((domain, endpoint))
    }

    /// A mapping that a check begins with.
    pub(super) fn mapped(&mut self, domain: u32, at: (u64, u64), phys: u64) -> Result<(), Stop> {
        let answer = self.map(domain, at, phys)?;
        self.prepare(&answer)
    }

    // Accesses.

    /// What each [`ACCESS`] bytes of the kit's memory hold.
    fn tag(address: u64) -> [u8; ACCESS] {
        let word = (address ^ 0x5249_4e47_0000_0000).to_le_bytes();
        core::array::from_fn(|at| word[at % 8])
    }

    fn tag_memory(&mut self) {
        for address in self.blocks() {
            self.subject.poke(address, &Self::tag(address));
        }
    }

    fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        let (first, last) = self.subject.memory();
        let begin = self.phys(0).max(first);
        let end = begin.saturating_add(PAGES * self.page() - 1).min(last);
        (begin..end).step_by(ACCESS)
    }

    /// The first block of memory that does not hold what it should.
    fn changed_block(&mut self) -> Option<(u64, [u8; ACCESS])> {
        let mut held = [0; ACCESS];
        self.blocks().find_map(|address| {
            self.subject.peek(address, &mut held);
            (held != Self::tag(address)).then_some((address, held))
        })
    }

    /// An endpoint reads or writes [`ACCESS`] bytes.
    pub(super) fn reach(&mut self, endpoint: u32, iova: u64, write: bool) -> Result<Reached, Stop> {
        let verb = if write { "writes" } else { "reads" };
        self.steps.push(format!("endpoint {endpoint} {verb} at {iova:#x}"));
        let mut bytes = [WRITTEN; ACCESS];
        let Some(result) = self.subject.access(endpoint, iova, write, &mut bytes) else {
            return not_applicable("no access can be tried");
        };
        let changed = self.changed_block();
        if changed.is_some() {
            self.tag_memory();
        }
        let reached = match (result, changed) {
            (Err(Refused), None) => Reached::Nothing,
            (Ok(()), Some((address, held))) if write && held == bytes => Reached::At(address),
            (Ok(()), None) if !write => {
                let read = self.blocks().find(|&address| Self::tag(address) == bytes);
                read.map_or(Reached::Elsewhere, Reached::At)
            }
            _ => Reached::Elsewhere,
        };
        if let Some(step) = self.steps.last_mut() {
            step.push_str(&format!(": {reached}"));
        }
        Ok(reached)
    }

    /// Expects that an access comes to `expected`.
    pub(super) fn expect_reach(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        expected: Reached,
    ) -> Result<(), Stop> {
        match self.reach(endpoint, iova, write)? {
            reached if reached == expected => Ok(()),
            reached => self.mismatch(reached, expected),
        }
    }

    /// Expects that reads and writes at the beginning and at the end of `at` come to guest memory
    /// from `phys` on.
    pub(super) fn expect_translated(
        &mut self,
        endpoint: u32,
        at: (u64, u64),
        phys: u64,
    ) -> Result<(), Stop> {
        let last = at.1 - (ACCESS as u64 - 1);
        for write in [false, true] {
            self.expect_reach(endpoint, at.0, write, Reached::At(phys))?;
            self.expect_reach(endpoint, last, write, Reached::At(phys + (last - at.0)))?;
        }
        Ok(())
    }

    /// Expects that reads and writes at the beginning and at the end of `at` are refused.
    pub(super) fn expect_out_of_reach(
        &mut self,
        endpoint: u32,
        at: (u64, u64),
    ) -> Result<(), Stop> {
        for write in [false, true] {
            self.expect_reach(endpoint, at.0, write, Reached::Nothing)?;
            self.expect_reach(endpoint, at.1 - (ACCESS as u64 - 1), write, Reached::Nothing)?;
        }
        Ok(())
    }

    /// Whether the page at `iova` of a domain is mapped, with an endpoint in it: by an access, or
    /// where there is none, by what a MAP over it is answered with.
    pub(super) fn is_mapped(
        &mut self,
        domain: u32,
        endpoint: u32,
        iova: u64,
    ) -> Result<bool, Stop> {
        match self.reach(endpoint, iova, false) {
            Ok(reached) => return Ok(reached != Reached::Nothing),
            Err(Stop::NotApplicable(_)) => _ = self.steps.pop(),
            Err(stop) => return Err(stop),
        }
        let at = (iova, iova + (self.page() - 1));
        let phys = self.phys(PAGES - 1);
        let answer = self.map(domain, at, phys)?;
        if answer.is(Status::Ok) {
            let answer = self.unmap(domain, at)?;
            self.prepare(&answer)?;
            return Ok(false);
        }
        Ok(true)
    }

    /// Not applicable where [`is_mapped`](Self::is_mapped) could not tell: to be asked before it.
    pub(super) fn can_tell_mapped(&mut self, domain: u32, endpoint: u32) -> Result<(), Stop> {
        let (first, last) = self.pages(PAGES - 1, PAGES - 1);
        match self.reach(endpoint, first, false) {
            Ok(_) => return Ok(()),
            Err(Stop::NotApplicable(_)) => {}
            Err(stop) => return Err(stop),
        }
        let phys = self.phys(PAGES - 1);
        self.mapped(domain, (first, last), phys)?;
        let twice = self.map(domain, (first, last), phys)?;
        if !twice.is(Status::Inval) {
            return not_applicable(
                "no access can be tried, and a MAP over a mapping is not refused: what is mapped \
                 cannot be seen",
            );
        }
        let answer = self.unmap(domain, (first, last))?;
        self.prepare(&answer)?;
        self.steps.clear();
        self.steps.push("attached".into());
        Ok(())
    }

    // Events.

    pub(super) fn post(&mut self, len: usize) -> Result<(), Stop> {
        self.steps.push(format!("an event buffer of {len} bytes"));
        match self.subject.post_event_buffer(len) {
            None => not_applicable("there is no event queue to look at"),
            Some(posted) => Ok(posted?),
        }
    }

    pub(super) fn event(&mut self) -> Result<Option<Event>, Stop> {
        let event = self.subject.next_event()?;
        self.steps.push(match &event {
            Some(event) => format!("an event of {} bytes", event.used),
            None => "no event".into(),
        });
        Ok(event)
    }
}

/// A feature's name.
fn feature_name(feature: Features) -> String {
    let names: Vec<&str> = feature.iter_names().map(|(name, _)| name).collect();
    names.join(", ")
}

fn range(at: (u64, u64)) -> Range {
    Range::new(Iova(at.0), Iova(at.1)).expect("the kit's ranges begin before they end")
}

pub(super) fn attach(domain: u32, endpoint: u32) -> Request {
    Request::Attach { domain, endpoint, flags: AttachFlags::empty() }
}

pub(super) fn map(domain: u32, at: (u64, u64), phys: u64) -> Request {
    let flags = MapFlags::READ | MapFlags::WRITE;
    Request::Map { domain, range: range(at), phys, flags }
}

pub(super) fn unmap(domain: u32, at: (u64, u64)) -> Request {
    Request::Unmap { domain, range: range(at) }
}

/// A request, in a few words.
pub(super) fn describe(request: &Request) -> String {
    match *request {
        Request::Attach { domain, endpoint, flags } => {
            let bypass = if flags.contains(AttachFlags::BYPASS) { " (BYPASS)" } else { "" };
            format!("ATTACH {endpoint} to {domain}{bypass}")
        }
        Request::Detach { domain, endpoint } => format!("DETACH {endpoint} from {domain}"),
        Request::Map { domain, range, phys, flags } => {
            let (first, last) = (range.first().0, range.last().0);
            let flags: Vec<&str> = flags.iter_names().map(|(name, _)| name).collect();
            let flags = flags.join("|");
            format!("MAP {first:#x}-{last:#x} of {domain} to {phys:#x} {flags}")
        }
        Request::Unmap { domain, range } => {
            format!("UNMAP {:#x}-{:#x} of {domain}", range.first().0, range.last().0)
        }
        Request::Probe { endpoint } => format!("PROBE {endpoint}"),
    }
}
