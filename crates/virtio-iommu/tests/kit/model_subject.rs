//! The model as the kit sees it.

use ringfence_virtio_iommu::kit::{Event, Failed, Refused, Subject};

use crate::{
    defect::Defect::*,
    model::{
        BYPASS_CONFIG, DEVERR, DOMAINS, ENDPOINTS, GRANULE, INPUT, Model, OK, PROBE, PROBE_SIZE,
        RAM, RAM_LEN,
    },
};

impl Subject for Model {
    fn offered(&self) -> u64 {
        self.offered
    }

    fn start(&mut self, features: u64) -> Result<(), Failed> {
        self.starts += 1;
        if self.starts >= self.lost_at {
            return Err(Failed::Broken("it is gone".into()));
        }
        assert_eq!(features & !self.offered, 0, "features that are not on offer");
        self.accepted = features;
        self.hung = false;
        self.dropped = false;
        self.buffers.clear();
        self.events.clear();
        if !self.is(ResetKeepsAttachments) {
            self.attached.clear();
            if !self.is(ResetKeepsDomains) {
                self.domains.clear();
            }
        }
        if self.is(ResetClearsBypass) {
            self.bypass = 0;
        }
        Ok(())
    }

    fn read_config(&mut self, offset: usize, out: &mut [u8]) -> Result<(), Failed> {
        let mask = match self.defect {
            Some(NoPageSize) => 0,
            Some(HugePages) => 1 << 63,
            _ => !(GRANULE - 1),
        };
        let begin = if self.is(BackwardsInputRange) { u64::MAX } else { INPUT.0 };
        let probe_size = if self.is(HugeProbes) { u32::MAX } else { PROBE_SIZE as u32 };
        let mut bytes = Vec::new();
        bytes.extend(u64::to_le_bytes(mask));
        bytes.extend(begin.to_le_bytes());
        bytes.extend(INPUT.1.to_le_bytes());
        bytes.extend(DOMAINS.0.to_le_bytes());
        bytes.extend(DOMAINS.1.to_le_bytes());
        bytes.extend(probe_size.to_le_bytes());
        bytes.extend([self.bypass, 0, 0, 0]);
        out.copy_from_slice(&bytes[offset..offset + out.len()]);
        Ok(())
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) -> Result<(), Failed> {
        assert_eq!((offset, data.len()), (36, 1), "a driver writes only bypass");
        let takes = self.has(BYPASS_CONFIG) && !self.is(BypassIsReadOnly);
        if takes && (self.is(BypassOfAnyValue) || data[0] < 2) {
            self.bypass = data[0];
        }
        Ok(())
    }

    fn request(
        &mut self,
        piece: usize,
        readable: &[u8],
        writable: &mut [u8],
    ) -> Result<u32, Failed> {
        if self.hung {
            return Err(Failed::Timeout);
        }
        let one = if self.is(OneDescriptor) { piece } else { usize::MAX };
        let readable = &readable[..one.min(readable.len())];
        if writable.len() < 4 {
            if self.is(ShortTailIsWritten) {
                writable.fill(0);
                return Ok(writable.len() as u32);
            }
            return Ok(0);
        }
        let mut request = [0; 72];
        let kind = readable.first().copied();
        let needed = match kind {
            Some(1 | 2) => 20,
            Some(3) => 36,
            Some(4) => 28,
            Some(5) if self.offered & PROBE != 0 || self.is(ProbeUnofferedReplied) => 72,
            _ if self.is(UnknownTypeIsUnsupp) && kind != Some(5) => 4,
            _ => return Ok(0),
        };
        let padded = self.is(CutShortIsPadded) && readable.len() >= 12;
        if readable.len() < needed && !padded {
            return Ok(0);
        }
        let len = readable.len().min(72);
        request[..len].copy_from_slice(&readable[..len]);
        let mut status = self.status(&request, writable);
        if self.hung {
            return Err(Failed::Timeout);
        }
        if status == OK && self.is(SuccessIsDevErr) && request[0] == 4 {
            status = DEVERR;
        }
        let at = if request[0] == 5 { writable.len() - 4 } else { 0 };
        let dirty = if self.is(TailIsDirty) { 1 } else { 0 };
        writable[at..at + 4].copy_from_slice(&[status, 0, dirty, 0]);
        Ok(at as u32 + 4)
    }

    fn endpoints(&self) -> Vec<u32> {
        ENDPOINTS.into()
    }

    fn absent_endpoint(&self) -> u32 {
        77
    }

    fn memory(&self) -> (u64, u64) {
        (RAM, RAM + RAM_LEN - 1)
    }

    fn peek(&mut self, address: u64, out: &mut [u8]) {
        let at = (address - RAM) as usize;
        out.copy_from_slice(&self.ram[at..at + out.len()]);
    }

    fn poke(&mut self, address: u64, bytes: &[u8]) {
        let at = (address - RAM) as usize;
        self.ram[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn access(
        &mut self,
        endpoint: u32,
        iova: u64,
        write: bool,
        bytes: &mut [u8],
    ) -> Option<Result<(), Refused>> {
        if self.blind {
            return None;
        }
        let found = self.translate(endpoint, iova, write).and_then(|gpa| gpa.checked_sub(RAM));
        let found = found.filter(|at| at + bytes.len() as u64 <= RAM_LEN).map(|at| at as usize);
        Some(match found {
            None => {
                self.report(endpoint, iova, write);
                Err(Refused)
            }
            Some(at) => {
                let at = at..at + bytes.len();
                match write {
                    true => self.ram[at].copy_from_slice(bytes),
                    false => bytes.copy_from_slice(&self.ram[at]),
                }
                match write && self.is(WriteRefusedWrites) {
                    true => Err(Refused),
                    false => Ok(()),
                }
            }
        })
    }

    fn post_event_buffer(&mut self, len: usize) -> Option<Result<(), Failed>> {
        if self.blind {
            return None;
        }
        match self.waiting.pop_front() {
            Some(event) => self.events.push_back(event),
            None => self.buffers.push_back(len),
        }
        Some(Ok(()))
    }

    fn next_event(&mut self) -> Result<Option<Event>, Failed> {
        Ok(self.events.pop_front())
    }

    fn system_reset(&mut self) -> Option<Result<(), Failed>> {
        self.attached.clear();
        self.domains.clear();
        if !self.is(SystemResetKeepsBypass) {
            self.bypass = 0;
        }
        Some(Ok(()))
    }
}
