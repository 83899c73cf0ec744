//! What endpoints reach, and the reports of what they do not.

use super::{Bench, PAGES, Stop, Verdict, not_applicable};
use crate::{
    kit::{ACCESS, Event, Refused},
    wire::Status,
};

/// What makes the tag of memory out of its address.
const TAG: u64 = 0x5249_4e47_0000_0000;
/// What an endpoint writes, if it can choose.
const WRITTEN: u8 = 0xa5;
/// What an endpoint's access came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It was refused, and nothing of the kit's memory has changed.
    Nothing,
    /// Guest memory at this address.
    At(u64),
    /// It was allowed, and reached none of the kit's memory; or it was refused, and changed the
    /// memory.
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

impl Bench<'_> {
    /// What each [`ACCESS`] bytes of the kit's memory hold.
    fn tag(address: u64) -> [u8; ACCESS] {
        let mut tag = [0; ACCESS];
        let word = (address ^ TAG).to_le_bytes();
        tag.chunks_exact_mut(word.len()).for_each(|part| part.copy_from_slice(&word));
        tag
    }

    /// The address that `bytes` are the tag of.
    fn tagged(bytes: &[u8; ACCESS]) -> Option<u64> {
        let word = u64::from_le_bytes(*bytes.first_chunk()?) ^ TAG;
        (Self::tag(word) == *bytes).then_some(word)
    }

    pub(crate) fn tag_memory(&mut self) {
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
    pub(crate) fn reach(&mut self, endpoint: u32, iova: u64, write: bool) -> Result<Reached, Stop> {
        let verb = if write { "writes" } else { "reads" };
        self.steps.push(format!("endpoint {endpoint} {verb} at {iova:#x}"));
        let mut bytes = [WRITTEN; ACCESS];
        let Some(result) = self.subject.access(endpoint, iova, write, &mut bytes) else {
            return not_applicable("no access can be tried");
        };
        // A read changes nothing, whatever its result.
        let changed = if write { self.changed_block() } else { None };
        if changed.is_some() {
            self.tag_memory();
        }
        let reached = match (result, changed) {
            (Err(Refused), None) => Reached::Nothing,
            (Ok(()), Some((address, held))) if write && held == bytes => Reached::At(address),
            (Ok(()), None) if !write => {
                let address = Self::tagged(&bytes).filter(|&at| self.blocks().any(|own| own == at));
                address.map_or(Reached::Elsewhere, Reached::At)
            }
            _ => Reached::Elsewhere,
        };
        if let Some(step) = self.steps.last_mut() {
            step.push_str(&format!(": {reached}"));
        }
        Ok(reached)
    }

    /// Expects that an access comes to `expected`.
    pub(crate) fn expect_reach(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        expected: Reached,
    ) -> Verdict {
        let reached = self.reach(endpoint, iova, write)?;
        self.holds(reached == expected, reached, expected)
    }

    /// Expects that reads and writes at the beginning and at the end of `at` reach guest memory
    /// from `phys` on.
    pub(crate) fn expect_translated(
        &mut self,
        endpoint: u32,
        at: (u64, u64),
        phys: u64,
    ) -> Verdict {
        let last = at.1 - (ACCESS as u64 - 1);
        for write in [false, true] {
            self.expect_reach(endpoint, at.0, write, Reached::At(phys))?;
            self.expect_reach(endpoint, last, write, Reached::At(phys + (last - at.0)))?;
        }
        Ok(())
    }

    /// Expects that reads and writes at the beginning and at the end of `at` are refused.
    pub(crate) fn expect_out_of_reach(&mut self, endpoint: u32, at: (u64, u64)) -> Verdict {
        for write in [false, true] {
            self.expect_reach(endpoint, at.0, write, Reached::Nothing)?;
            self.expect_reach(endpoint, at.1 - (ACCESS as u64 - 1), write, Reached::Nothing)?;
        }
        Ok(())
    }

    /// Expects that neither a read nor a write at `iova` reaches guest memory at `phys`.
    pub(crate) fn expect_not_at(&mut self, endpoint: u32, iova: u64, phys: u64) -> Verdict {
        for write in [false, true] {
            let reached = self.reach(endpoint, iova, write)?;
            self.holds(reached != Reached::At(phys), reached, "nothing of the domain")?;
        }
        Ok(())
    }

    /// Whether the page at `iova` of a domain is mapped, with an endpoint in it: by an access, or
    /// if none can be made, by the status of a MAP over it.
    pub(crate) fn is_mapped(
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
        let free = self.map(domain, at, phys)?.is(Status::Ok);
        if free {
            self.unmap(domain, at)?.given()?;
        }
        Ok(!free)
    }

    /// Not applicable if [`is_mapped`](Self::is_mapped) could not find out: to be called before it.
    pub(crate) fn can_observe_mapped(&mut self, domain: u32, endpoint: u32) -> Verdict {
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
        self.unmap(domain, (first, last))?.given()?;
        self.steps.clear();
        self.steps.push("attached".into());
        Ok(())
    }

    pub(crate) fn post(&mut self, len: usize) -> Verdict {
        self.steps.push(format!("an event buffer of {len} bytes"));
        match self.subject.post_event_buffer(len) {
            None => not_applicable("there is no event queue to look at"),
            Some(posted) => Ok(posted?),
        }
    }

    pub(crate) fn event(&mut self) -> Result<Option<Event>, Stop> {
        let event = self.subject.next_event()?;
        self.steps.push(match &event {
            Some(event) => format!("an event of {} bytes", event.used),
            None => "no event".into(),
        });
        Ok(event)
    }
}
