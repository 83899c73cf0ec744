//! A virtio-iommu as a list, and the ways in which it can be wrong.

use std::collections::{BTreeMap, VecDeque};

use crate::defect::Defect::{self, *};
use ringfence_virtio_iommu::kit::Event;

const MAP_UNMAP: u64 = 1 << 2;
const OLD_BYPASS: u64 = 1 << 3;
pub(crate) const PROBE: u64 = 1 << 4;
const MMIO: u64 = 1 << 5;
pub(crate) const BYPASS_CONFIG: u64 = 1 << 6;

pub(crate) const OK: u8 = 0;
const UNSUPP: u8 = 2;
pub(crate) const DEVERR: u8 = 3;
const INVAL: u8 = 4;
const RANGE: u8 = 5;
const NOENT: u8 = 6;

pub(crate) const GRANULE: u64 = 4096;
pub(crate) const PROBE_SIZE: usize = 128;
pub(crate) const INPUT: (u64, u64) = (0x1000, 0xf_ffff_ffff);
pub(crate) const DOMAINS: (u32, u32) = (3, 1000);
pub(crate) const RAM: u64 = 0x10_0000;
pub(crate) const RAM_LEN: u64 = 32 * GRANULE;
pub(crate) const ENDPOINTS: [u32; 2] = [8, 16];

#[derive(Clone, Copy)]
struct Mapping {
    first: u64,
    last: u64,
    phys: u64,
    flags: u32,
    /// The only endpoint it is for, if not for all.
    only: Option<u32>,
}

#[derive(Clone, Default)]
pub(crate) struct Domain {
    bypass: bool,
    mappings: Vec<Mapping>,
}

/// The device, its endpoints and their memory.
pub(crate) struct Model {
    pub(crate) defect: Option<Defect>,
    pub(crate) offered: u64,
    pub(crate) accepted: u64,
    pub(crate) bypass: u8,
    pub(crate) domains: BTreeMap<u32, Domain>,
    pub(crate) attached: BTreeMap<u32, u32>,
    pub(crate) regions: Vec<(u8, u64, u64)>,
    pub(crate) ram: Vec<u8>,
    pub(crate) buffers: VecDeque<usize>,
    pub(crate) events: VecDeque<Event>,
    /// Whether it does not reply until it is reset.
    pub(crate) hung: bool,
    pub(crate) dropped: bool,
    /// Reports without a buffer, if they wait.
    pub(crate) waiting: VecDeque<Event>,
    /// Whether it cannot make accesses.
    pub(crate) blind: bool,
    pub(crate) starts: usize,
    /// From which start on it cannot be started.
    pub(crate) lost_at: usize,
}

impl Model {
    /// All features but the old BYPASS, and a region of each kind.
    pub(crate) fn full(defect: Option<Defect>) -> Model {
        let offered = 0x77 & if defect == Some(NoMapUnmap) { !MAP_UNMAP } else { !0 };
        let offered = offered | if defect == Some(BothBypasses) { OLD_BYPASS } else { 0 };
        let mut regions = vec![(1, 0xfee0_0000, 0xfeef_ffff), (0, RAM + 0x5000, RAM + 0x5fff)];
        match defect {
            Some(RegionTwoMsis) => regions.push((1, 0xfed0_0000, 0xfed0_0fff)),
            Some(RegionOverlap) => regions.push((0, 0xfeef_f000, 0xfef0_0fff)),
            _ => {}
        }
        Model {
            defect,
            offered,
            accepted: 0,
            bypass: 0,
            domains: BTreeMap::new(),
            attached: BTreeMap::new(),
            regions,
            ram: vec![0; RAM_LEN as usize],
            buffers: VecDeque::new(),
            events: VecDeque::new(),
            hung: false,
            dropped: false,
            waiting: VecDeque::new(),
            blind: false,
            starts: 0,
            lost_at: usize::MAX,
        }
    }

    /// MAP, UNMAP and the old BYPASS, nothing else.
    pub(crate) fn bare(defect: Option<Defect>) -> Model {
        let offered = 3 | MAP_UNMAP | OLD_BYPASS;
        Model { offered, regions: Vec::new(), ..Model::full(defect) }
    }

    /// A device with a defect, and whether it is a bare one: where the defect shows.
    pub(crate) fn of(defect: Defect) -> (Model, bool) {
        match defect {
            OldBypassIgnored | MmioUnoffered | ProbeUnofferedReplied => {
                (Model::bare(Some(defect)), true)
            }
            _ => (Model::full(Some(defect)), false),
        }
    }

    pub(crate) fn is(&self, defect: Defect) -> bool {
        self.defect == Some(defect)
    }

    pub(crate) fn has(&self, feature: u64) -> bool {
        self.accepted & feature != 0
    }

    pub(crate) fn status(&mut self, request: &[u8; 72], reply: &mut [u8]) -> u8 {
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().unwrap());
        if self.is(HeadReservedChecked) && request[1..4] != [0; 3] {
            return INVAL;
        }
        match request[0] {
            1 => self.attach(word(4), word(8), word(12), &request[16..20]),
            2 => self.detach(word(4), word(8), &request[12..20]),
            3 => self.map(word(4), long(8), long(16), long(24), word(32)),
            4 => self.unmap(word(4), long(8), long(16), &request[24..28]),
            5 => self.probe(word(4), &request[8..], reply),
            _ => UNSUPP,
        }
    }

    fn attach(&mut self, id: u32, endpoint: u32, flags: u32, reserved: &[u8]) -> u8 {
        if id < DOMAINS.0 || id > DOMAINS.1 {
            self.hung |= self.is(HangsOutsideDomainRange);
            return RANGE;
        }
        let known = if self.has(BYPASS_CONFIG) { 1 } else { 0 };
        let bad = reserved != [0; 4] && !self.is(AttachReservedIgnored)
            || flags & !known != 0 && !self.is(AttachFlagsIgnored);
        if bad && !self.is(AttachRefusedAttaches) {
            return INVAL;
        }
        if !ENDPOINTS.contains(&endpoint) {
            return if self.is(AttachAbsentIsInval) { INVAL } else { NOENT };
        }
        let bypass = flags & 1 != 0;
        let before = self.attached.get(&endpoint).copied();
        match self.domains.get(&id) {
            Some(domain) if domain.bypass != bypass && !self.is(AttachMixesBypass) => return INVAL,
            Some(_) if before != Some(id) => {
                if self.is(AttachSecondIsInval) {
                    return INVAL;
                }
                if self.is(AttachSecondIsNot) {
                    return OK;
                }
            }
            _ => {}
        }
        if let Some(before) = before.filter(|&before| before != id) {
            match self.defect {
                Some(AttachAgainIsInval) => return INVAL,
                Some(AttachAgainIsUnsupp) => return UNSUPP,
                Some(AttachAgainStays) => {
                    self.domains.entry(id).or_default();
                    return OK;
                }
                Some(AttachAgainKeepsDomain) => _ = self.attached.remove(&endpoint),
                _ => self.leave(before, endpoint),
            }
        }
        if !self.is(AttachMakesNoDomain) {
            self.domains.entry(id).or_insert(Domain { bypass, mappings: Vec::new() });
        }
        self.attached.insert(endpoint, id);
        if bad { INVAL } else { OK }
    }

    fn leave(&mut self, id: u32, endpoint: u32) {
        self.attached.remove(&endpoint);
        let others = self.attached.values().any(|&other| other == id);
        if !others || self.is(DetachEndsDomainOfOthers) {
            self.domains.remove(&id);
        }
    }

    fn detach(&mut self, id: u32, endpoint: u32, reserved: &[u8]) -> u8 {
        if self.is(DetachReservedChecked) && reserved != [0; 8] {
            return INVAL;
        }
        if !ENDPOINTS.contains(&endpoint) {
            return if self.is(DetachAbsentIsInval) { INVAL } else { NOENT };
        }
        if self.attached.get(&endpoint) != Some(&id) {
            self.hung |= self.is(HangsOnWrongDomain);
            return INVAL;
        }
        match self.defect {
            // The detach is ignored: the endpoint goes on as before.
            Some(DetachKeepsMappings) => {}
            Some(DetachKeepsDomain) => _ = self.attached.remove(&endpoint),
            _ => self.leave(id, endpoint),
        }
        OK
    }

    fn map(&mut self, id: u32, first: u64, last: u64, phys: u64, flags: u32) -> u8 {
        if last < first {
            self.hung |= self.is(HangsOnBackwardsMap);
            return INVAL;
        }
        if phys.checked_add(last - first).is_none() {
            self.hung |= self.is(HangsOnTargetOverflow);
            return RANGE;
        }
        if (first, last) == INPUT {
            self.hung |= self.is(HangsOnLargestMap);
        }
        let known = if self.has(MMIO) || self.is(MmioUnoffered) { 7 } else { 3 };
        if flags & !known != 0 && !self.is(MapFlagsIgnored) {
            return INVAL;
        }
        let Some(domain) = self.domains.get(&id) else {
            return if self.is(MapMissingDomainIsInval) { INVAL } else { NOENT };
        };
        if domain.bypass && !self.is(MapInBypassDomain) || self.is(MapIsInval) {
            return INVAL;
        }
        if flags & 3 == 2 && self.is(NoWriteOnly) {
            return OK;
        }
        let off = |at: u64| !at.is_multiple_of(GRANULE);
        if off(first) && !self.is(MapStartUnchecked)
            || off(last.wrapping_add(1)) && !self.is(MapEndUnchecked)
            || off(phys) && !self.is(MapTargetUnchecked)
        {
            return RANGE;
        }
        let end = last == INPUT.1 || first == INPUT.0;
        if (first < INPUT.0 || last > INPUT.1) && !self.is(MapOutsideInputRange)
            || end && self.is(MapEndsAreRange)
        {
            return RANGE;
        }
        let members = self.attached.iter().filter(|&(_, &of)| of == id);
        let reserved = members.filter(|&(&endpoint, _)| endpoint == 16).count() > 0;
        let over = |&(_, a, b): &(u8, u64, u64)| a <= last && b >= first;
        if reserved && self.regions.iter().any(over) && !self.is(MapOverReservedRegion) {
            return INVAL;
        }
        let over = |held: &Mapping| held.first <= last && held.last >= first;
        let inside = |held: &Mapping| held.first < first && held.last > last;
        let (overlaps, overlaps_inside) = (self.is(MapOverlaps), self.is(MapOverlapsInside));
        let (removes, rest) = (self.is(MapOverlapRemoves), self.is(MapOverlapMapsRest));
        let only = if self.is(MapForLastEndpoint) {
            self.attached.keys().copied().next_back()
        } else {
            None
        };
        let domain = self.domains.get_mut(&id).unwrap();
        if domain.mappings.iter().any(|held| over(held) && !(overlaps_inside && inside(held)))
            && !overlaps
        {
            if rest && domain.mappings.iter().all(|held| held.first > first) {
                let last = domain.mappings.iter().map(|held| held.first).min().unwrap() - 1;
                domain.mappings.push(Mapping { first, last, phys, flags, only });
            }
            if removes {
                domain.mappings.retain(|held| !over(held));
            }
            return INVAL;
        }
        domain.mappings.insert(0, Mapping { first, last, phys, flags, only });
        OK
    }

    fn unmap(&mut self, id: u32, first: u64, last: u64, reserved: &[u8]) -> u8 {
        if last < first {
            self.hung |= self.is(HangsOnBackwardsUnmap);
            return INVAL;
        }
        if reserved != [0; 4] {
            self.hung |= self.is(HangsOnUnmapReserved);
            return INVAL;
        }
        let defect = self.defect;
        let Some(domain) = self.domains.get_mut(&id) else {
            return if defect == Some(UnmapMissingDomainIsOk) { OK } else { NOENT };
        };
        if domain.bypass {
            return if defect == Some(UnmapInBypassDomain) { OK } else { INVAL };
        }
        let covered = |held: &Mapping| held.first >= first && held.last <= last;
        let over = |held: &Mapping| held.first <= last && held.last >= first;
        if domain.mappings.iter().any(|held| over(held) && !covered(held)) {
            match defect {
                Some(SplitIsOk) => return OK,
                Some(SplitIsInval) => return INVAL,
                Some(SplitRemovesCovered) => domain.mappings.retain(|held| !covered(held)),
                Some(SplitSplits) => domain.mappings.retain(|held| !over(held)),
                _ => {}
            }
            return RANGE;
        }
        let count = domain.mappings.iter().filter(|held| covered(held)).count();
        let bytes: u64 =
            domain.mappings.iter().filter(|held| covered(held)).map(|h| h.last - h.first + 1).sum();
        match defect {
            Some(UnmapIsStale) => return OK,
            Some(UnmapEverythingIsNothing) if (first, last) == INPUT => return OK,
            Some(UnmapNothingIsNoEnt) if count == 0 => return NOENT,
            Some(UnmapHolesIsRange) if bytes < last - first + 1 => return RANGE,
            Some(UnmapOnlyExact) if count == 1 && bytes == last - first + 1 => {
                domain.mappings.retain(|held| !covered(held));
            }
            Some(UnmapOnlyExact) if count > 0 => return RANGE,
            Some(UnmapOnlyFirst) => {
                let from = domain.mappings.iter().filter(|h| covered(h)).map(|h| h.first).min();
                domain.mappings.retain(|held| Some(held.first) != from);
            }
            Some(UnmapRemovesNeighbours) => {
                domain.mappings.retain(|held| !over(held) && held.first != last + 1);
            }
            _ => domain.mappings.retain(|held| !covered(held)),
        }
        OK
    }

    fn probe(&mut self, endpoint: u32, reserved: &[u8], reply: &mut [u8]) -> u8 {
        let properties = reply.len() - 4;
        let out = &mut reply[..properties];
        if self.is(ProbeReservedChecked) && reserved.iter().any(|&byte| byte != 0) {
            return INVAL;
        }
        if self.is(HangsOnProbe) {
            self.hung = true;
        }
        if self.is(ProbeIsUnsupp) {
            return UNSUPP;
        }
        if !ENDPOINTS.contains(&endpoint) {
            return if self.is(ProbeAbsentIsOk) { OK } else { NOENT };
        }
        let mut bytes = Vec::new();
        if endpoint == 16 {
            for &(subtype, first, last) in &self.regions {
                let kind: u16 = if self.is(PropertyReservedBits) { 0x2001 } else { 1 };
                let len: u16 = match self.defect {
                    Some(PropertyCountsHead) => 24,
                    Some(PropertyTooLong) => 2000,
                    _ => 20,
                };
                bytes.extend(kind.to_le_bytes());
                bytes.extend(len.to_le_bytes());
                bytes.extend([subtype, 0, 0, if self.is(RegionReserved) { 1 } else { 0 }]);
                bytes.extend(first.to_le_bytes());
                bytes.extend(last.to_le_bytes());
            }
        }
        let behind = if self.is(PropertyRubbishBehind) { 0x11 } else { 0 };
        bytes.extend([0; 4]);
        bytes.resize(PROBE_SIZE, behind);
        if properties < PROBE_SIZE {
            if self.is(ProbeSmallWrites) {
                let kind: [u8; 24] = [1, 0, 20]
                    .iter()
                    .copied()
                    .chain([0; 21])
                    .collect::<Vec<_>>()
                    .try_into()
                    .unwrap();
                let len = properties.min(24);
                out[..len].copy_from_slice(&kind[..len]);
            }
            return if self.is(ProbeSmallIsOk) { OK } else { INVAL };
        }
        out.fill(0);
        out[..PROBE_SIZE].copy_from_slice(&bytes);
        OK
    }

    pub(crate) fn translate(&self, endpoint: u32, iova: u64, write: bool) -> Option<u64> {
        let in_region = |&(_, a, b): &(u8, u64, u64)| (a..=b).contains(&iova);
        if self.is(RegionReachesMemory) && self.regions.iter().any(in_region) {
            return Some(iova);
        }
        let Some(id) = self.attached.get(&endpoint) else {
            let offered = self.offered & BYPASS_CONFIG != 0;
            let counts = match self.defect {
                Some(BypassNeedsAcceptance) => self.has(BYPASS_CONFIG),
                _ => offered,
            };
            let bypass = counts && self.bypass == 1
                || self.has(OLD_BYPASS) && !self.is(OldBypassIgnored)
                || self.is(UnattachedReachesAll);
            return bypass.then_some(if self.is(BypassIsNotIdentity) {
                iova ^ 0x1000
            } else {
                iova
            });
        };
        let domain = self.domains.get(id)?;
        if domain.bypass {
            return (!self.is(BypassDomainIsEmpty)).then_some(iova);
        }
        let mut of: Vec<&Domain> = vec![domain];
        if self.is(OneDomainForAll) {
            of = self.domains.values().collect();
        }
        let found = of.iter().flat_map(|domain| &domain.mappings).find(|held| {
            let last = match self.defect {
                Some(MapIsShort) => held.last - 0x800,
                Some(MapIsLong) => held.last + 0x1000,
                _ => held.last,
            };
            (held.first..=last).contains(&iova)
        });
        if found.is_none() && self.is(BypassForAttached) && self.bypass == 1 {
            return Some(iova);
        }
        let found = found.filter(|held| held.only.is_none_or(|only| only == endpoint))?;
        let needed = if write { 2 } else { 1 };
        let allowed = found.flags & needed != 0
            || write && matches!(self.defect, Some(WriteWithoutFlag | WriteRefusedWrites));
        if self.is(MapIgnoresTarget) {
            return allowed.then_some(RAM + 0x9000 + iova % GRANULE);
        }
        allowed.then(|| found.phys + (iova - found.first))
    }

    pub(crate) fn report(&mut self, endpoint: u32, iova: u64, write: bool) {
        let mut bytes = vec![0; 24];
        bytes[0] = 2;
        bytes[1] = self.is(FaultReserved).into();
        let flags = 0x100 | if write { 2 } else { 1 };
        let flags: u32 = flags | if self.is(FaultUndefinedFlags) { 4 } else { 0 };
        bytes[4..8].copy_from_slice(&flags.to_le_bytes());
        let endpoint = if self.is(FaultOtherEndpoint) { 99 } else { endpoint };
        bytes[8..12].copy_from_slice(&endpoint.to_le_bytes());
        bytes[12] = self.is(FaultReserved1).into();
        let iova = if self.is(FaultOtherAddress) { iova ^ 0x1000 } else { iova };
        bytes[16..].copy_from_slice(&iova.to_le_bytes());
        let Some(len) = self.buffers.pop_front() else {
            self.hung |= self.is(StopsWithoutEventBuffer);
            self.dropped = true;
            if self.is(ResetKeepsFaults) {
                self.waiting.push_back(Event { used: 24, bytes });
            }
            return;
        };
        if self.dropped && self.is(NoEventsAfterDrop) {
            return;
        }
        if len >= 24 {
            bytes.resize(len, 0);
            self.events.push_back(Event { used: 24, bytes });
        } else if self.is(FaultInSeveralBuffers) {
            for part in bytes.chunks(len) {
                self.events.push_back(Event { used: len as u32, bytes: part.to_vec() });
            }
        } else {
            self.events.push_back(Event { used: 0, bytes: vec![0; len] });
        }
    }
}
