//! A device's state as bytes, for a guest that moves.

use ringfence_iommu::{Domain, Iova, Prot, Range, Result, table::Mapping};

use super::{Backing, Device, RestoreError, Session, joint::each_mapping};
use crate::wire::{AttachFlags, CONFIG_LEN, Features, MapRequest};

/// What the bytes begin with.
const MAGIC: [u8; 4] = *b"RFvi";
/// The version of the format.
pub(super) const VERSION: u32 = 1;

impl<B: Backing> Device<B> {
    /// All state that the driver has set up, as bytes for [`restore`](Self::restore): what was
    /// negotiated, `bypass`, the domains, their members and their mappings. Request queues must
    /// have been stopped; the transport saves the state of the rings.
    ///
    /// # Errors
    /// A domain cannot [list its mappings](Domain::mappings_from).
    pub fn save(&self) -> Result<Vec<u8>> {
        let state = self.state.read();
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.config());
        out.extend(self.negotiated().bits().to_le_bytes());
        let mut domains: Vec<_> = state.domains.iter().collect();
        domains.sort_unstable_by_key(|&(&id, _)| id);
        out.extend(count(domains.len()));
        for (id, entry) in domains {
            out.extend(id.to_le_bytes());
            let flags = match (&entry.view.domain, &entry.view.lazy) {
                (None, _) => AttachFlags::BYPASS,
                (Some(_), Some(_)) => AttachFlags::LAZY,
                (Some(_), None) => AttachFlags::empty(),
            };
            out.extend(flags.bits().to_le_bytes());
            out.extend(count(entry.members.len()));
            for (endpoint, _) in &entry.members {
                out.extend(endpoint.to_le_bytes());
            }
            let at = out.len();
            out.extend(0_u64.to_le_bytes());
            if let Some(domain) = &entry.view.domain {
                let mappings = save_mappings(&**domain, &mut out)?;
                out[at..at + 8].copy_from_slice(&mappings.to_le_bytes());
            }
        }
        let sum = checksum(&out);
        out.extend(sum.to_le_bytes());
        Ok(out)
    }

    /// Takes over what [`save`](Self::save) returned, before endpoints or request queues work. Each
    /// part of it is checked as a request is. All or nothing.
    ///
    /// # Errors
    /// [`RestoreError::InUse`]: nothing has changed. After all others, see [`RestoreError`], the
    /// device is as after a [reset](Self::reset).
    pub fn restore(&self, bytes: &[u8]) -> core::result::Result<(), RestoreError> {
        self.if_unused(|| self.take_over(bytes))
    }

    pub(super) fn take_over(&self, bytes: &[u8]) -> core::result::Result<(), RestoreError> {
        if self.domains() != 0 {
            return Err(RestoreError::InUse);
        }
        let bypass = self.bypasses();
        let restored = self.read_state(bytes);
        if restored.is_err() {
            // For an endpoint that cannot be put back, the next request that moves it reports the
            // error.
            let _ = self.put_bypass(bypass);
            let _ = self.clear();
        }
        restored
    }

    fn read_state(&self, bytes: &[u8]) -> core::result::Result<(), RestoreError> {
        let Some((body, sum)) = bytes.split_last_chunk::<8>() else {
            return Err(RestoreError::Format("too short"));
        };
        let mut rest = Reader(body);
        if rest.take()? != MAGIC {
            return Err(RestoreError::Format("it begins with something else"));
        }
        let version = rest.u32()?;
        if version != VERSION {
            return Err(RestoreError::Version(version));
        }
        if u64::from_le_bytes(*sum) != checksum(body) {
            return Err(RestoreError::Format("the checksum is wrong"));
        }
        let config: [u8; CONFIG_LEN] = rest.take()?;
        let mut mine = self.config();
        // All but `bypass`, which is the driver's.
        mine[BYPASS_AT] = config[BYPASS_AT];
        if mine != config || config[BYPASS_AT] > 1 {
            return Err(RestoreError::Differs("its configuration"));
        }
        let negotiated = rest.u64()?;
        let negotiated = Features::from_bits(negotiated).filter(|&it| self.features().contains(it));
        self.negotiate(negotiated.ok_or(RestoreError::Differs("its features"))?);
        // What cannot bypass is blocked.
        let _ = self.put_bypass(config[BYPASS_AT] == 1);
        let mut session = Session::new();
        for _ in 0..rest.u32()? {
            let id = rest.u32()?;
            let refused = |status| RestoreError::Refused { domain: id, status };
            // `attach` checks that they fit what was negotiated.
            let flags = AttachFlags::from_bits(rest.u32()?)
                .ok_or(RestoreError::Format("an unknown kind of domain"))?;
            for _ in 0..rest.u32()? {
                self.attach(&mut session, id, rest.u32()?, flags).map_err(refused)?;
            }
            for _ in 0..rest.u64()? {
                let (first, last) = (Iova(rest.u64()?), Iova(rest.u64()?));
                let (phys, prot) = (rest.u64()?, rest.u32()?);
                let range = Range::new(first, last).ok_or(RestoreError::Format("a range"))?;
                let flags = Prot::from_bits(prot).ok_or(RestoreError::Format("a permission"))?;
                let map = MapRequest { domain: id, range, phys, flags };
                self.map(&mut session, map).map_err(refused)?;
            }
        }
        match rest.0 {
            [] => Ok(()),
            _ => Err(RestoreError::Format("something follows")),
        }
    }
}

/// Where `bypass` lies in the configuration.
const BYPASS_AT: usize = 36;

fn save_mappings(domain: &impl Domain, out: &mut Vec<u8>) -> Result<u64> {
    let mut total = 0;
    each_mapping(domain, Range::ALL, |&Mapping { range, target, prot }| {
        out.extend(range.first().0.to_le_bytes());
        out.extend(range.last().0.to_le_bytes());
        out.extend(target.to_le_bytes());
        out.extend(prot.bits().to_le_bytes());
        total += 1;
        Ok(())
    })?;
    Ok(total)
}

fn count(items: usize) -> [u8; 4] {
    // Domains and members are counted in 32 bits everywhere.
    u32::try_from(items).unwrap_or(u32::MAX).to_le_bytes()
}

/// FNV-1a: finds bytes that were lost or changed on the way, not those that were forged; these are
/// checked like requests.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Bytes that are taken from the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> core::result::Result<[u8; N], RestoreError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(RestoreError::Format("too short"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> core::result::Result<u32, RestoreError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> core::result::Result<u64, RestoreError> {
        self.take().map(u64::from_le_bytes)
    }
}
