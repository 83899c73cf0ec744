//! The building blocks of checks: requests, accesses, and expectations.

mod access;
mod requests;

pub(super) use access::Reached;
pub(super) use requests::{Reply, UNWRITTEN, WHOLE, attach, describe, map, unmap};

use std::fmt::Display;

use super::{Failed, Level, Mismatch, Subject};
use crate::wire::{
    BYPASS_AT, Features, MAX_REQUEST_LEN, Properties, RawConfig, Request, Status, TAIL_LEN,
};
use zerocopy::{FromZeros, IntoBytes};

/// One requirement on a device.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The number of the rule: 22 for [V22].
    ///
    /// [V22]: https://github.com/ringfence/ringfence/blob/main/docs/rules.md#v22
    pub rule: u8,
    /// How much it binds.
    pub level: Level,
    /// Its name, unique.
    pub name: &'static str,
    /// What the device must do, in a sentence.
    pub says: &'static str,
    /// The features without which it does not apply.
    pub(super) needs: Features,
    pub(super) run: fn(&mut Bench<'_>) -> Verdict,
}

/// How a check ends: well, or before its end.
pub(crate) type Verdict = Result<(), Stop>;

/// Why a check ends early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The device does otherwise.
    Mismatch(Mismatch),
    /// It cannot be judged: why.
    NotApplicable(String),
    /// The device does not reply.
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

/// A check goes on only if it applies.
pub(super) fn applies(does: bool, why: impl Into<String>) -> Verdict {
    if does { Ok(()) } else { not_applicable(why) }
}

/// After `sent` the device did `came` instead of `expected`.
fn mismatch<T>(sent: String, came: impl Display, expected: impl Display) -> Result<T, Stop> {
    let (came, expected) = (came.to_string(), expected.to_string());
    Err(Stop::Mismatch(Mismatch { sent, came, expected }))
}

/// The kit's own pages, in guest memory and in each domain.
pub(super) const PAGES: u64 = 32;
/// The largest `probe_size` that is tried: more is no size but a mistake.
const MOST_PROBED: usize = 1 << 14;
/// How many of the last steps a report lists.
const STEPS: usize = 8;

/// A device under test, started, and what was done to it since.
pub(crate) struct Bench<'a> {
    pub(super) subject: &'a mut dyn Subject,
    /// The features that the driver accepted.
    pub(super) features: Features,
    steps: Vec<String>,
    /// What the check that runs has noted.
    pub(super) note: Option<String>,
    /// What `bypass` was at first.
    initial_bypass: Option<u8>,
    config: RawConfig,
    /// The kit's first page in each domain, or why there is no room for its pages. Not known before
    /// the first start.
    base: Option<Result<u64, String>>,
}

impl<'a> Bench<'a> {
    pub(super) fn new(subject: &'a mut dyn Subject) -> Bench<'a> {
        Bench {
            subject,
            features: Features::empty(),
            steps: Vec::new(),
            note: None,
            initial_bypass: None,
            config: RawConfig::new_zeroed(),
            base: None,
        }
    }

    /// What the device offers of the known features.
    pub(super) fn offered(&self) -> Features {
        Features::from_bits_truncate(self.subject.offered())
    }

    /// What a driver would accept: all but the old BYPASS.
    pub(super) fn wanted(&self) -> Features {
        self.offered().difference(Features::BYPASS)
    }

    /// A reset, with all features, `bypass` zero where that can be.
    pub(super) fn restart(&mut self) -> Result<(), Failed> {
        self.note = None;
        self.steps.clear();
        self.start(self.wanted())?;
        self.subject.read_config(0, self.config.as_mut_bytes())?;
        if self.features.contains(Features::BYPASS_CONFIG) {
            self.initial_bypass.get_or_insert(self.config.bypass);
            self.subject.write_config(BYPASS_AT, &[0])?;
        }
        if self.base.is_none() {
            self.base = Some(self.find_window()?);
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
            let _ = self.subject.write_config(BYPASS_AT, &[bypass]);
        }
    }

    /// What was done since the check began, for the report.
    pub(super) fn steps(&self) -> String {
        let from = self.steps.len().saturating_sub(STEPS);
        let begin = if from > 0 { "... " } else { "" };
        format!("{begin}{}", self.steps[from..].join(", "))
    }

    /// Ends a check that the device passes with something to report.
    pub(super) fn note(&mut self, note: impl Into<String>) -> Verdict {
        self.note = Some(note.into());
        Ok(())
    }

    pub(super) fn note_step(&mut self, step: impl Into<String>) {
        self.steps.push(step.into());
    }

    /// The device did `came` instead of `expected`.
    pub(super) fn mismatch<T>(
        &self,
        came: impl Display,
        expected: impl Display,
    ) -> Result<T, Stop> {
        mismatch(self.steps(), came, expected)
    }

    /// A mismatch, unless what is expected holds.
    pub(super) fn holds(&self, does: bool, came: impl Display, expected: impl Display) -> Verdict {
        if does { Ok(()) } else { self.mismatch(came, expected) }
    }

    /// Not applicable unless the driver has accepted all `features`.
    ///
    /// What MAP_UNMAP is needed for needs room for the kit's pages as well.
    pub(super) fn needs(&self, features: Features) -> Verdict {
        for (name, feature) in features.iter_names() {
            applies(self.features.contains(feature), format!("{name} is not offered"))?;
        }
        match &self.base {
            Some(Err(why)) if features.contains(Features::MAP_UNMAP) => not_applicable(&**why),
            _ if features.contains(Features::PROBE) && self.probe_size() > MOST_PROBED => {
                not_applicable(format!("probe_size is {}", self.probe_size()))
            }
            _ => Ok(()),
        }
    }

    // The configuration.

    pub(super) fn page_size_mask(&self) -> u64 {
        self.config.page_size_mask.get()
    }

    /// The smallest page size; 4 KiB if there is none.
    pub(super) fn granule(&self) -> u64 {
        match self.page_size_mask() {
            0 => 4096,
            mask => mask & mask.wrapping_neg(),
        }
    }

    /// The kit's page: a multiple of the granule in which accesses have room. Smaller than the granule
    /// where memory is too small: then nothing is mapped.
    pub(super) fn page(&self) -> u64 {
        let (first, last) = self.subject.memory();
        let most = last.saturating_sub(first) / PAGES;
        let granule = self.granule();
        if granule > most.saturating_add(1) { 4096 } else { granule.max(4096) }
    }

    /// What can be mapped: first and last.
    pub(super) fn input_range(&self) -> (u64, u64) {
        match self.features.contains(Features::INPUT_RANGE) {
            true => (self.config.input_start.get(), self.config.input_end.get()),
            false => (0, u64::MAX),
        }
    }

    /// The first and the last number of a domain.
    pub(super) fn domain_range(&self) -> (u32, u32) {
        match self.features.contains(Features::DOMAIN_RANGE) {
            true => (self.config.domain_start.get(), self.config.domain_end.get()),
            false => (0, u32::MAX),
        }
    }

    pub(super) fn probe_size(&self) -> usize {
        self.config.probe_size.get() as usize
    }

    /// What `bypass` was when the kit came to it, before it wrote to it.
    pub(super) fn initial_bypass(&self) -> u8 {
        self.initial_bypass.unwrap_or(0)
    }

    pub(super) fn read_bypass(&mut self) -> Result<u8, Stop> {
        let mut byte = [0];
        self.subject.read_config(BYPASS_AT, &mut byte)?;
        let [byte] = byte;
        self.steps.push(format!("bypass reads {byte}"));
        Ok(byte)
    }

    pub(super) fn write_bypass(&mut self, value: u8) -> Verdict {
        self.steps.push(format!("bypass = {value}"));
        Ok(self.subject.write_config(BYPASS_AT, &[value])?)
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

    /// The number of the kit's domain `n`.
    pub(super) fn domain(&self, n: u32) -> Result<u32, Stop> {
        let (first, last) = self.domain_range();
        // Not the first one if there are enough: a field that was not set holds 0.
        let from = if last.saturating_sub(first) > 8 { first + 1 } else { first };
        match from.checked_add(n).filter(|&domain| domain <= last) {
            Some(domain) => Ok(domain),
            None => not_applicable(format!("it takes {} domains", n + 1)),
        }
    }

    /// Addresses from the kit's page `first` to the end of its page `last`.
    pub(super) fn pages(&self, first: u64, last: u64) -> (u64, u64) {
        let page = self.page();
        let base = self.base.as_ref().and_then(|base| base.as_ref().ok()).copied().unwrap_or(0);
        (base + first * page, base + last * page + (page - 1))
    }

    /// Where the kit's page `n` of guest memory lies.
    pub(super) fn phys(&self, n: u64) -> u64 {
        let (first, _) = self.subject.memory();
        let page = self.page();
        first.checked_next_multiple_of(page).unwrap_or(first) + (n % PAGES) * page
    }

    /// A place for the kit's pages in every domain: its own memory's addresses if it may, so that
    /// an access that bypasses is not taken for one that is refused. Or why there is none.
    fn find_window(&mut self) -> Result<Result<u64, String>, Failed> {
        let page = self.page();
        if page < self.granule() {
            return Ok(Err(format!("a granule of {:#x} bytes is too large", self.granule())));
        }
        let (first, last) = self.input_range();
        let mut taken: Vec<(u64, u64)> = self.subject.kept().into_iter().collect();
        for endpoint in self.subject.endpoints() {
            match self.reserved(endpoint) {
                Ok(regions) => taken.extend(regions),
                // The checks of PROBE will fail; the others need not.
                Err(Failed::Timeout) => self.start(self.wanted())?,
                Err(failed) => return Err(failed),
            }
        }
        taken.sort_unstable();
        let end_of = |base: u64| base.checked_add(PAGES * page - 1).filter(|&end| end <= last);
        let own = self.phys(0);
        let free = |&(a, b): &(u64, u64)| end_of(own).is_some_and(|end| b < own || a > end);
        if own >= first && end_of(own).is_some() && taken.iter().all(free) {
            return Ok(Ok(own));
        }
        // The first gap that is large enough.
        let mut base = first.checked_next_multiple_of(page);
        for (from, to) in taken {
            let Some((at, end)) = base.and_then(|at| Some((at, end_of(at)?))) else { break };
            if from <= end && to >= at {
                base = to.checked_add(1).and_then(|next| next.checked_next_multiple_of(page));
            }
        }
        Ok(base.filter(|&base| end_of(base).is_some()).ok_or_else(|| {
            format!("{first:#x} to {last:#x} has no room for {PAGES} pages of {page:#x} bytes")
        }))
    }

    /// The regions that PROBE reports for an endpoint; none if it cannot be sent.
    pub(super) fn reserved(&mut self, endpoint: u32) -> Result<Vec<(u64, u64)>, Failed> {
        if self.needs(Features::PROBE).is_err() {
            return Ok(Vec::new());
        }
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = Request::Probe { endpoint }.emit(&mut bytes);
        let size = self.probe_size();
        let mut reply = vec![UNWRITTEN; size + TAIL_LEN];
        self.subject.request(WHOLE, &bytes[..len], &mut reply)?;
        if reply[size] != Status::Ok as u8 {
            return Ok(Vec::new());
        }
        let regions = Properties::new(&reply[..size]).map(|region| region.range);
        Ok(regions.map(|range| (range.first().0, range.last().0)).collect())
    }
}
