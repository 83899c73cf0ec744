//! QEMU's `edu` device: a DMA engine that does one thing at a time, from or to any address.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use crate::pci::{Function, Registers};

/// Where its own buffer lies for its engine. This program cannot look into it.
const BUFFER: u64 = 0x4_0000;
/// The most that it moves at once: QEMU takes its last byte for one too many.
pub(crate) const MOST: usize = 2048;

const SOURCE: usize = 0x80;
const DESTINATION: usize = 0x88;
const COUNT: usize = 0x90;
const COMMAND: usize = 0x98;
const RUN: u64 = 1;
const TO_MEMORY: u64 = 2;
/// It takes a tenth of a second, by QEMU's clock, on a machine that may be busy.
const TIMEOUT: Duration = Duration::from_secs(20);

/// One of them, which is an endpoint.
pub(crate) struct Edu {
    endpoint: u32,
    registers: Registers,
}

impl Edu {
    /// All that the machine has.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn all() -> Result<Vec<Edu>> {
        let functions = Function::all(0x1234, 0x11e8)?;
        functions.iter().map(Edu::over).collect()
    }

    fn over(function: &Function) -> Result<Edu> {
        let registers = function.registers(0)?;
        let identity: u32 = registers.read(0);
        ensure!(identity & 0xffff == 0xed, "an edu that says {identity:#x}");
        Ok(Edu { endpoint: function.number(), registers })
    }

    /// What the IOMMU knows it by.
    pub(crate) fn endpoint(&self) -> u32 {
        self.endpoint
    }

    /// Reads `len` bytes at `iova` into its buffer, as far as it is let.
    ///
    /// # Errors
    /// It does not end.
    pub(crate) fn load(&self, iova: u64, len: usize) -> Result<()> {
        self.run(iova, BUFFER, len, RUN)
    }

    /// Writes the first `len` bytes of its buffer to `iova`, as far as it is let.
    ///
    /// # Errors
    /// It does not end.
    pub(crate) fn store(&self, iova: u64, len: usize) -> Result<()> {
        self.run(BUFFER, iova, len, RUN | TO_MEMORY)
    }

    fn run(&self, source: u64, destination: u64, len: usize, command: u64) -> Result<()> {
        // Beyond its buffer it ends the whole machine.
        ensure!(len <= MOST, "{len} bytes are too many for an edu");
        self.registers.write(SOURCE, source);
        self.registers.write(DESTINATION, destination);
        self.registers.write(COUNT, len as u64);
        self.registers.write(COMMAND, command);
        let begun = Instant::now();
        while self.registers.read::<u64>(COMMAND) & RUN != 0 {
            ensure!(begun.elapsed() < TIMEOUT, "the edu does not end");
            sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}
