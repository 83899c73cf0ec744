//! A naive model of a virtio-iommu device: maps of mappings, written from the numbered rules and
//! from nothing of the device's own code, not even its constants. It determines for each request's
//! bytes which replies are allowed and what the reply OK does, and for each access where it leads.
//!
//! If several things are wrong with a request, the rules do not say which one the status reports:
//! the model allows every status that applies. Where the rules are silent the choices are ours: a
//! head cut short is as good as an unknown type; a mapping without READ and WRITE is refused;
//! `input_range` and `domain_range` hold whether their features were negotiated or not.

use std::collections::{BTreeMap, BTreeSet};

pub(crate) const MAP_UNMAP: u64 = 1 << 2;
pub(crate) const PROBE: u64 = 1 << 4;
pub(crate) const MMIO: u64 = 1 << 5;
pub(crate) const BYPASS_CONFIG: u64 = 1 << 6;

pub(crate) const OK: u8 = 0;
pub(crate) const UNSUPP: u8 = 2;
pub(crate) const DEVERR: u8 = 3;
pub(crate) const INVAL: u8 = 4;
pub(crate) const RANGE: u8 = 5;
pub(crate) const NOENT: u8 = 6;
pub(crate) const NOMEM: u8 = 8;

const TAIL: usize = 4;

/// A mapping as it was made; both ends are part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Mapping {
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) phys: u64,
    pub(crate) flags: u32,
}

/// A reserved region; both ends are part of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) msi: bool,
}

fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 <= b.1 && b.0 <= a.1
}

/// What the device was made with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) offered: u64,
    pub(crate) page_size_mask: u64,
    pub(crate) input: (u64, u64),
    pub(crate) domains: (u32, u32),
    pub(crate) probe_size: u32,
    pub(crate) bypass: bool,
    pub(crate) max_domains: usize,
    /// In one domain.
    pub(crate) max_mappings: u64,
    /// Table memory is so short that a MAP may fail.
    pub(crate) scarce: bool,
    pub(crate) endpoints: BTreeMap<u32, Vec<Region>>,
}

/// What a domain holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Bypass,
    Mappings(BTreeMap<u64, Mapping>),
}

/// How a request may be completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// Nothing is written; used length 0.
    Unwritten,
    /// A tail at `at` with one of these statuses, where the used length ends; nothing before it.
    Tail { at: usize, any_of: BTreeSet<u8> },
    /// All of the buffer.
    Properties(Vec<u8>),
}

/// What a request with the status OK does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    Nothing,
    Attach { domain: u32, endpoint: u32, bypass: bool },
    Detach { endpoint: u32 },
    Map { domain: u32, mapping: Mapping },
    Unmap { domain: u32, first: u64, last: u64 },
}

/// The device.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) setup: Setup,
    negotiated: u64,
    bypass: bool,
    pub(crate) domains: BTreeMap<u32, Space>,
    pub(crate) attached: BTreeMap<u32, u32>,
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Model {
    /// A device on which nothing was negotiated.
    pub(crate) fn new(setup: Setup) -> Model {
        let bypass = setup.bypass;
        let (domains, attached) = (BTreeMap::new(), BTreeMap::new());
        Model { setup, negotiated: 0, bypass, domains, attached }
    }

    pub(crate) fn set_features(&mut self, bits: u64) {
        self.negotiated = bits & self.setup.offered;
    }

    fn has(&self, feature: u64) -> bool {
        self.negotiated & feature != 0
    }

    pub(crate) fn config(&self) -> [u8; 40] {
        let Setup { page_size_mask, input, domains, probe_size, .. } = &self.setup;
        let mut bytes = Vec::new();
        for word in [*page_size_mask, input.0, input.1] {
            bytes.extend(word.to_le_bytes());
        }
        for word in [domains.0, domains.1, *probe_size, self.bypass.into()] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.try_into().expect("forty bytes")
    }

    /// Only `bypass`, only if negotiated, only 0 and 1 (rules V3, V32).
    pub(crate) fn write_config(&mut self, offset: usize, data: &[u8]) {
        if offset <= 36 && self.has(BYPASS_CONFIG) {
            match data.get(36 - offset) {
                Some(0) => self.bypass = false,
                Some(1) => self.bypass = true,
                _ => {}
            }
        }
    }

    /// Rules V3 and V4.
    pub(crate) fn reset(&mut self) {
        self.negotiated = 0;
        self.domains.clear();
        self.attached.clear();
    }

    /// Rule V3.
    pub(crate) fn system_reset(&mut self) {
        self.reset();
        self.bypass = self.setup.bypass;
    }

    /// Where an access leads, if it is allowed (rules V5, V6, V19, V20).
    pub(crate) fn access(&self, endpoint: u32, addr: u64, write: bool) -> Option<u64> {
        self.setup.endpoints.get(&endpoint)?;
        match self.attached.get(&endpoint) {
            None => (self.setup.offered & BYPASS_CONFIG != 0 && self.bypass).then_some(addr),
            Some(domain) => match &self.domains[domain] {
                Space::Bypass => Some(addr),
                Space::Mappings(mappings) => {
                    let (_, found) = mappings.range(..=addr).next_back()?;
                    let wanted = if write { 2 } else { 1 };
                    (addr <= found.last && found.flags & wanted != 0)
                        .then(|| addr - found.first + found.phys)
                }
            },
        }
    }

    /// The allowed replies to a request with `room` bytes for the reply, and what OK does.
    pub(crate) fn judge(&self, bytes: &[u8], room: usize) -> (Completion, Effect) {
        let unwritten = (Completion::Unwritten, Effect::Nothing);
        // Rule V8.
        if room < TAIL || bytes.len() < 4 {
            return unwritten;
        }
        let (len, at) = match bytes[0] {
            1 | 2 => (20, 0),
            3 => (36, 0),
            4 => (28, 0),
            // Rule V24.
            5 if self.has(PROBE) => (72, room - TAIL),
            _ => return unwritten,
        };
        let mut wrong = BTreeSet::new();
        if bytes.len() < len {
            wrong.insert(INVAL);
            return (Completion::Tail { at, any_of: wrong }, Effect::Nothing);
        }
        let effect = match bytes[0] {
            1 => self.attach(bytes, &mut wrong),
            2 => self.detach(bytes, &mut wrong),
            3 => self.map(bytes, &mut wrong),
            4 => self.unmap(bytes, &mut wrong),
            _ => match self.probe(bytes, room, &mut wrong) {
                Some(properties) => return (Completion::Properties(properties), Effect::Nothing),
                None => Effect::Nothing,
            },
        };
        if wrong.is_empty() {
            wrong.insert(OK);
            if let (Effect::Map { .. }, true) = (effect, self.setup.scarce) {
                wrong.insert(NOMEM);
            }
        }
        (Completion::Tail { at, any_of: wrong }, effect)
    }

    /// Applies a request that was completed with OK.
    pub(crate) fn commit(&mut self, effect: Effect) {
        match effect {
            Effect::Nothing => {}
            Effect::Attach { domain, endpoint, bypass } => {
                // Rule V11; an endpoint that is in the domain already stays in it.
                if self.attached.get(&endpoint) == Some(&domain) {
                    return;
                }
                self.commit(Effect::Detach { endpoint });
                self.domains.entry(domain).or_insert_with(|| match bypass {
                    true => Space::Bypass,
                    false => Space::Mappings(BTreeMap::new()),
                });
                self.attached.insert(endpoint, domain);
            }
            Effect::Detach { endpoint } => {
                // Rule V14.
                if let Some(domain) = self.attached.remove(&endpoint)
                    && !self.attached.values().any(|&other| other == domain)
                {
                    self.domains.remove(&domain);
                }
            }
            Effect::Map { domain, mapping } => {
                if let Some(Space::Mappings(mappings)) = self.domains.get_mut(&domain) {
                    mappings.insert(mapping.first, mapping);
                }
            }
            Effect::Unmap { domain, first, last } => {
                if let Some(Space::Mappings(mappings)) = self.domains.get_mut(&domain) {
                    mappings.retain(|_, held| held.last < first || last < held.first);
                }
            }
        }
    }

    /// How many mappings there are in all domains.
    pub(crate) fn count(&self) -> u64 {
        let count = |space: &Space| match space {
            Space::Bypass => 0,
            Space::Mappings(mappings) => mappings.len() as u64,
        };
        self.domains.values().map(count).sum()
    }

    fn granule_mask(&self) -> u64 {
        let lowest = self.setup.page_size_mask.trailing_zeros();
        (1 << lowest) - 1
    }

    fn attach(&self, bytes: &[u8], wrong: &mut BTreeSet<u8>) -> Effect {
        let (domain, endpoint, flags) = (le32(bytes, 4), le32(bytes, 8), le32(bytes, 12));
        let bypass = flags & 1 != 0;
        // Rule V9.
        if bytes[16..20] != [0; 4] || flags > 1 || (bypass && !self.has(BYPASS_CONFIG)) {
            wrong.insert(INVAL);
        }
        let (first, last) = self.setup.domains;
        if domain < first || last < domain {
            wrong.insert(RANGE);
        }
        let Some(regions) = self.setup.endpoints.get(&endpoint) else {
            wrong.insert(NOENT);
            return Effect::Nothing;
        };
        match self.domains.get(&domain) {
            // Rule V10.
            Some(Space::Bypass) if bypass => {}
            Some(Space::Mappings(mappings)) if !bypass => {
                // Rule V12.
                let hit = |held: &Mapping| {
                    regions.iter().any(|r| overlap((r.first, r.last), (held.first, held.last)))
                };
                if mappings.values().any(hit) {
                    wrong.insert(UNSUPP);
                }
            }
            Some(_) => _ = wrong.insert(INVAL),
            None => {
                let mut after = self.clone();
                after.commit(Effect::Detach { endpoint });
                if after.domains.len() >= self.setup.max_domains {
                    wrong.insert(NOMEM);
                }
            }
        }
        Effect::Attach { domain, endpoint, bypass }
    }

    fn detach(&self, bytes: &[u8], wrong: &mut BTreeSet<u8>) -> Effect {
        let (domain, endpoint) = (le32(bytes, 4), le32(bytes, 8));
        // Rule V13.
        if !self.setup.endpoints.contains_key(&endpoint) {
            wrong.insert(NOENT);
        } else if self.attached.get(&endpoint) != Some(&domain) {
            wrong.insert(INVAL);
        }
        Effect::Detach { endpoint }
    }

    /// The mappings of a domain in which MAP and UNMAP are possible.
    fn mappings(&self, domain: u32, wrong: &mut BTreeSet<u8>) -> Option<&BTreeMap<u64, Mapping>> {
        if !self.has(MAP_UNMAP) {
            wrong.insert(UNSUPP);
        }
        // Rules V17 and V21.
        match self.domains.get(&domain) {
            Some(Space::Mappings(mappings)) => return Some(mappings),
            Some(Space::Bypass) => wrong.insert(INVAL),
            None => wrong.insert(NOENT),
        };
        None
    }

    fn map(&self, bytes: &[u8], wrong: &mut BTreeSet<u8>) -> Effect {
        let (domain, first, last) = (le32(bytes, 4), le64(bytes, 8), le64(bytes, 16));
        let (phys, flags) = (le64(bytes, 24), le32(bytes, 32));
        let mapping = Mapping { first, last, phys, flags };
        let mappings = self.mappings(domain, wrong);
        // Rule V17.
        if flags > 7 || (flags & 4 != 0 && !self.has(MMIO)) || flags & 3 == 0 {
            wrong.insert(INVAL);
        }
        if last < first {
            wrong.extend([INVAL, RANGE]);
            return Effect::Nothing;
        }
        let mask = self.granule_mask();
        // Rule V15.
        if first & mask != 0 || phys & mask != 0 || last & mask != mask {
            wrong.insert(RANGE);
        }
        // Rule V38.
        if first == last && mask != 0 {
            wrong.insert(INVAL);
        }
        if phys.checked_add(last - first).is_none() {
            wrong.extend([INVAL, RANGE]);
        }
        // Rule V18.
        if first < self.setup.input.0 || self.setup.input.1 < last {
            wrong.insert(RANGE);
        }
        let members = self.attached.iter().filter(|&(_, &held)| held == domain);
        let mut reserved = members.flat_map(|(endpoint, _)| &self.setup.endpoints[endpoint]);
        if reserved.any(|r| overlap((r.first, r.last), (first, last))) {
            wrong.insert(INVAL);
        }
        if let Some(mappings) = mappings {
            // Rule V16.
            if mappings.values().any(|held| overlap((held.first, held.last), (first, last))) {
                wrong.insert(INVAL);
            }
            if mappings.len() as u64 >= self.setup.max_mappings {
                wrong.insert(NOMEM);
            }
        }
        Effect::Map { domain, mapping }
    }

    fn unmap(&self, bytes: &[u8], wrong: &mut BTreeSet<u8>) -> Effect {
        let (domain, first, last) = (le32(bytes, 4), le64(bytes, 8), le64(bytes, 16));
        let mappings = self.mappings(domain, wrong);
        // Rule V21 allows either; the device refuses.
        if bytes[24..28] != [0; 4] {
            wrong.insert(INVAL);
        }
        if last < first {
            wrong.extend([INVAL, RANGE]);
            return Effect::Nothing;
        }
        // Rules V22, V23, V40: it may end anywhere but inside of a mapping.
        let split = |held: &Mapping| {
            (held.first < first && first <= held.last) || (held.first <= last && last < held.last)
        };
        if mappings.is_some_and(|mappings| mappings.values().any(split)) {
            wrong.insert(RANGE);
        }
        Effect::Unmap { domain, first, last }
    }

    fn probe(&self, bytes: &[u8], room: usize, wrong: &mut BTreeSet<u8>) -> Option<Vec<u8>> {
        let regions = self.setup.endpoints.get(&le32(bytes, 4));
        if regions.is_none() {
            wrong.insert(NOENT);
        }
        // Rule V26.
        if room - TAIL < self.setup.probe_size as usize {
            wrong.insert(INVAL);
        }
        if !wrong.is_empty() {
            return None;
        }
        // Rules V25 and V27.
        let regions = regions?;
        let twice = regions.iter().enumerate().any(|(n, a)| {
            regions[..n].iter().any(|b| overlap((a.first, a.last), (b.first, b.last)))
        });
        if twice || regions.iter().filter(|region| region.msi).count() > 1 {
            wrong.insert(DEVERR);
            return None;
        }
        let mut out = Vec::new();
        for Region { first, last, msi } in regions {
            out.extend([1, 0, 20, 0, (*msi).into(), 0, 0, 0]);
            out.extend(first.to_le_bytes());
            out.extend(last.to_le_bytes());
        }
        out.resize(room, 0);
        Some(out)
    }
}
