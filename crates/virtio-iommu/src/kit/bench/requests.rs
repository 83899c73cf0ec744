//! Requests, and the replies expected to them.

use std::fmt::Display;

use ringfence_iommu::{Iova, Range};

use super::{Bench, Stop, Verdict, applies, mismatch};
use crate::wire::{
    AttachFlags, Features, MAX_REQUEST_LEN, MapFlags, MapRequest, Request, Status, TAIL_LEN,
    UnmapRequest,
};

/// The value of the bytes of a reply that the device has not written.
pub(crate) const UNWRITTEN: u8 = 0xee;

/// Pieces so large that every request lies in one descriptor for reading and one for writing.
pub(crate) const WHOLE: usize = usize::MAX;

/// A reply.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    /// What was done to the device since the check began, this request included.
    sent: String,
    pub(crate) used: u32,
    pub(crate) bytes: Vec<u8>,
}

impl Reply {
    fn is_unwritten(&self) -> bool {
        self.used == 0 && self.bytes.iter().all(|&byte| byte == UNWRITTEN)
    }

    /// The last bytes: status and reserved.
    pub(crate) fn tail(&self) -> Option<[u8; TAIL_LEN]> {
        self.bytes.last_chunk().copied().filter(|_| self.used > 0)
    }

    pub(crate) fn status(&self) -> Option<Status> {
        self.tail().and_then(|tail| Status::from_u8(tail[0]))
    }

    pub(crate) fn is(&self, status: Status) -> bool {
        self.status() == Some(status)
    }

    /// Expects one of the statuses.
    pub(crate) fn expect(&self, statuses: &[Status]) -> Verdict {
        if self.status().is_some_and(|status| statuses.contains(&status)) {
            return Ok(());
        }
        let names: Vec<String> = statuses.iter().map(Status::to_string).collect();
        self.mismatch(self, names.join(" or "))
    }

    /// Expects that a request is refused, with any status or none.
    pub(crate) fn expect_refusal(&self) -> Verdict {
        if self.is(Status::Ok) { self.mismatch(self, "a refusal") } else { Ok(()) }
    }

    /// Expects that the buffer comes back without a byte written.
    pub(crate) fn expect_unwritten(&self) -> Verdict {
        match self.is_unwritten() {
            true => Ok(()),
            false => self.mismatch(self, "nothing written, used length 0"),
        }
    }

    /// The reply is `came` instead of `expected`.
    pub(crate) fn mismatch(&self, came: impl Display, expected: impl Display) -> Verdict {
        mismatch(self.sent.clone(), came, expected)
    }

    /// Of a request that prepares a check: if it fails, the check is not applicable.
    pub(crate) fn given(&self) -> Verdict {
        applies(self.is(Status::Ok), format!("it begins with {}", self.sent))
    }
}

impl std::fmt::Display for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.used, self.tail()) {
            (0, _) if self.is_unwritten() => f.write_str("nothing written"),
            (0, _) => f.write_str("used length 0, but bytes written"),
            (used, Some([UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN])) => {
                write!(f, "used length {used}, and no tail where the buffer ends")
            }
            (_, Some([raw, ..])) => match Status::from_u8(raw) {
                Some(status) => status.fmt(f),
                None => write!(f, "status {raw}"),
            },
            (used, None) => write!(f, "used length {used}"),
        }
    }
}

impl Bench<'_> {
    /// Sends `readable` in descriptors of at most `piece` bytes, with room for a reply of `room`
    /// bytes. Checks the used length.
    pub(crate) fn send(
        &mut self,
        what: impl Into<String>,
        piece: usize,
        readable: &[u8],
        room: usize,
    ) -> Result<Reply, Stop> {
        self.steps.push(what.into());
        let mut bytes = vec![UNWRITTEN; room];
        let used = self.subject.request(piece, readable, &mut bytes)?;
        let mut reply = Reply { sent: String::new(), used, bytes };
        if let Some(step) = self.steps.last_mut() {
            step.push_str(&format!(": {reply}"));
        }
        if used as usize > room {
            return self.mismatch(format!("used length {used}"), format!("at most {room}"));
        }
        reply.sent = self.steps();
        Ok(reply)
    }

    /// Sends a request, after `change` to its bytes.
    pub(crate) fn changed(
        &mut self,
        request: Request,
        what: &str,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<Reply, Stop> {
        let mut bytes = [0; MAX_REQUEST_LEN];
        let len = request.emit(&mut bytes);
        change(&mut bytes[..len]);
        let what = match what {
            "" => describe(&request),
            what => format!("{} with {what}", describe(&request)),
        };
        self.send(what, WHOLE, &bytes[..len], TAIL_LEN)
    }

    pub(crate) fn request(&mut self, request: Request) -> Result<Reply, Stop> {
        self.changed(request, "", |_| {})
    }

    pub(crate) fn attach(&mut self, domain: u32, endpoint: u32) -> Result<Reply, Stop> {
        self.request(attach(domain, endpoint))
    }

    pub(crate) fn attach_bypass(&mut self, domain: u32, endpoint: u32) -> Result<Reply, Stop> {
        let flags = AttachFlags::BYPASS;
        self.request(Request::Attach { domain, endpoint, flags })
    }

    pub(crate) fn detach(&mut self, domain: u32, endpoint: u32) -> Result<Reply, Stop> {
        self.request(Request::Detach { domain, endpoint })
    }

    /// MAP, to read and to write.
    pub(crate) fn map(&mut self, domain: u32, at: (u64, u64), phys: u64) -> Result<Reply, Stop> {
        self.request(map(domain, at, phys))
    }

    pub(crate) fn unmap(&mut self, domain: u32, at: (u64, u64)) -> Result<Reply, Stop> {
        self.request(unmap(domain, at))
    }

    /// An endpoint (the kit's number `n`) in the kit's domain `domain`: the numbers of both.
    pub(crate) fn attached(&mut self, domain: u32, n: usize) -> Result<(u32, u32), Stop> {
        self.needs(Features::MAP_UNMAP)?;
        let (domain, endpoint) = (self.domain(domain)?, self.endpoint(n)?);
        self.attach(domain, endpoint)?.given()?;
        Ok((domain, endpoint))
    }

    /// A mapping that a check begins with.
    pub(crate) fn mapped(&mut self, domain: u32, at: (u64, u64), phys: u64) -> Verdict {
        self.map(domain, at, phys)?.given()
    }
}

fn range(at: (u64, u64)) -> Range {
    Range::new(Iova(at.0), Iova(at.1)).expect("the kit's ranges begin before they end")
}

pub(crate) fn attach(domain: u32, endpoint: u32) -> Request {
    Request::Attach { domain, endpoint, flags: AttachFlags::empty() }
}

pub(crate) fn map(domain: u32, at: (u64, u64), phys: u64) -> Request {
    let flags = MapFlags::READ | MapFlags::WRITE;
    Request::Map(MapRequest { domain, range: range(at), phys, flags })
}

pub(crate) fn unmap(domain: u32, at: (u64, u64)) -> Request {
    Request::Unmap(UnmapRequest { domain, range: range(at) })
}

/// A request, in a few words.
pub(crate) fn describe(request: &Request) -> String {
    match *request {
        Request::Attach { domain, endpoint, flags } => {
            let bypass = if flags.contains(AttachFlags::BYPASS) { " (BYPASS)" } else { "" };
            format!("ATTACH {endpoint} to {domain}{bypass}")
        }
        Request::Detach { domain, endpoint } => format!("DETACH {endpoint} from {domain}"),
        Request::Map(MapRequest { domain, range, phys, flags }) => {
            let (first, last) = (range.first().0, range.last().0);
            let flags: Vec<&str> = flags.iter_names().map(|(name, _)| name).collect();
            let flags = flags.join("|");
            format!("MAP {first:#x}-{last:#x} of {domain} to {phys:#x} {flags}")
        }
        Request::Unmap(UnmapRequest { domain, range }) => {
            format!("UNMAP {:#x}-{:#x} of {domain}", range.first().0, range.last().0)
        }
        Request::Probe { endpoint } => format!("PROBE {endpoint}"),
        Request::IotlbFlush { domain } => format!("IOTLB_FLUSH domain {domain}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_shows_what_was_written() {
        let text = |used, bytes: &[u8]| {
            Reply { sent: String::new(), used, bytes: bytes.into() }.to_string()
        };
        let nothing = [UNWRITTEN; 8];
        assert_eq!(text(0, &nothing), "nothing written");
        assert_eq!(text(4, &nothing), "used length 4, and no tail where the buffer ends");
        assert_eq!(text(8, &[0, 0, 0, 0, 2, 0, 0, 0]), "UNSUPP");
        assert_eq!(text(4, &[UNWRITTEN, 0, 0, 0]), "status 238");
        assert_eq!(text(0, &[0; 4]), "used length 0, but bytes written");
        assert_eq!(text(2, &[0; 2]), "used length 2");
    }
}
