//! A device that replies at random.

use ringfence_virtio_iommu::kit::{Event, Failed, Refused, Subject};

/// Random configuration, statuses, used lengths, properties, accesses and events.
pub(crate) struct Noise {
    state: u64,
    config: [u8; 40],
    offered: u64,
    ram: Vec<u8>,
}

const RAM: u64 = 0x10_0000;

impl Noise {
    pub(crate) fn new(seed: u64) -> Noise {
        let ram = vec![0; 32 << 12];
        let mut noise = Noise { state: seed | 1, config: [0; 40], offered: 0, ram };
        noise.offered = noise.next() | 1 << 2;
        let mut config = Vec::new();
        for _ in 0..5 {
            config.extend(noise.number().to_le_bytes());
        }
        noise.config = config.try_into().unwrap();
        // Often a page size that lets the kit get further.
        if noise.below(3) > 0 {
            noise.config[..8].copy_from_slice(&0x1000u64.to_le_bytes());
        }
        noise
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Where mistakes are made.
    fn number(&mut self) -> u64 {
        match self.below(6) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << self.below(64),
            3 => (1u64 << self.below(64)).wrapping_sub(1),
            4 => u64::MAX - self.below(0x3000),
            _ => self.next(),
        }
    }
}

impl Subject for Noise {
    fn offered(&self) -> u64 {
        self.offered
    }
    fn start(&mut self, _: u64) -> Result<(), Failed> {
        match self.below(500) {
            0 => Err(Failed::Timeout),
            _ => Ok(()),
        }
    }
    fn read_config(&mut self, offset: usize, out: &mut [u8]) -> Result<(), Failed> {
        out.copy_from_slice(&self.config[offset..offset + out.len()]);
        Ok(())
    }
    fn write_config(&mut self, offset: usize, data: &[u8]) -> Result<(), Failed> {
        self.config[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }
    fn request(&mut self, _: usize, _: &[u8], writable: &mut [u8]) -> Result<u32, Failed> {
        let len = writable.len();
        for at in (0..len).step_by(4) {
            let word = (self.number() as u32).to_le_bytes();
            let part = &mut writable[at..];
            let count = part.len().min(4);
            part[..count].copy_from_slice(&word[..count]);
        }
        // Mostly a status, so that checks go on.
        if len >= 4 && self.below(8) > 0 {
            let ok = self.below(3) > 0;
            writable[len - 4] = if ok { 0 } else { self.below(9) as u8 };
        }
        match self.below(40) {
            0 => Err(Failed::Timeout),
            1 => Ok(u32::MAX),
            2 => Ok(0),
            3 => Ok(len as u32 + 1),
            _ => Ok(len as u32),
        }
    }
    fn endpoints(&self) -> Vec<u32> {
        vec![1, u32::MAX]
    }
    fn absent_endpoint(&self) -> u32 {
        77
    }
    fn memory(&self) -> (u64, u64) {
        (RAM, RAM + self.ram.len() as u64 - 1)
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
        _: u32,
        _: u64,
        write: bool,
        bytes: &mut [u8],
    ) -> Option<Result<(), Refused>> {
        let at = self.below(256) as usize * 512;
        match self.below(8) {
            0 => return None,
            1..4 => return Some(Err(Refused)),
            4..6 if write => self.ram[at..at + bytes.len()].copy_from_slice(bytes),
            _ => bytes.copy_from_slice(&self.ram[at..at + bytes.len()]),
        }
        Some(Ok(()))
    }
    fn post_event_buffer(&mut self, _: usize) -> Option<Result<(), Failed>> {
        Some(Ok(()))
    }
    fn next_event(&mut self) -> Result<Option<Event>, Failed> {
        let used = [0, 8, 24, u32::MAX][self.below(4) as usize];
        let bytes = vec![self.next() as u8; self.below(65) as usize];
        Ok((self.below(4) > 0).then_some(Event { used, bytes }))
    }
}
