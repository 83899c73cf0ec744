//! How a command begins.

#![allow(clippy::result_large_err, reason = "what is given back is moved as it came")]

use ringfence_dma::DmaBuffer;
use ringfence_iommu::{Domain, HostAddr};
use ringfence_iova::Allocator;

use super::{
    super::{
        Data, Error, Namespace, NotSubmitted, Op, Refused, Registers, command::Noted, wire::Command,
    },
    IoQueue,
};

impl<D, A, R, B> IoQueue<D, A, R, B>
where
    D: Domain<Target = HostAddr> + 'static,
    A: Allocator + 'static,
    R: Registers,
    B: DmaBuffer<HostAddr>,
{
    /// Adds a command; [`publish`](Self::publish) starts it. Its completion has the `token`.
    ///
    /// # Errors
    /// The command is not submitted, and its data is in the error.
    #[track_caller]
    pub fn submit(
        &mut self,
        namespace: &Namespace,
        op: Op,
        data: Data<B>,
        token: u64,
    ) -> Result<(), Refused<B>> {
        let command = match self.check(namespace, op, &data) {
            Ok(command) => command,
            Err(why) => return Err(Refused { why, data: Some(data) }),
        };
        let Some(at) = self.transfers.take() else {
            return Err(Refused { why: NotSubmitted::Full, data: Some(data) });
        };
        let command = command.id(at as u16);
        let begun = self.begin(at, Noted { token, command, ..Noted::default() }, op, data);
        begun.inspect_err(|_| self.transfers.release(at))
    }

    /// Begins to map a command's data, or puts the command into the ring if that is not needed.
    #[track_caller]
    fn begin(
        &mut self,
        at: usize,
        noted: Noted<B>,
        op: Op,
        data: Data<B>,
    ) -> Result<(), Refused<B>> {
        let stopped = NotSubmitted::Queue(Error::Stopped);
        let Some(rings) = &mut self.rings else {
            return Err(Refused { why: stopped, data: Some(data) });
        };
        let command = noted.command;
        let pushed = match (&data, op.direction()) {
            (Data::None, None) => {
                rings.push_bare(at, command, op);
                Ok(())
            }
            (Data::Pooled(buffer), Some(_)) => {
                rings.push(at, command, buffer.segments().iter().copied())
            }
            (Data::Persistent(buffer, bytes), Some(_)) => {
                match buffer.segments_for(bytes.clone()) {
                    Ok(segments) => rings.push(at, command, segments),
                    Err(_) => Err(NotSubmitted::Data),
                }
            }
            (Data::At(segment), Some(_)) if self.inner.is_confined() => {
                rings.push(at, command, std::iter::once(*segment))
            }
            (Data::Buffer(_) | Data::List(_), Some(direction)) => {
                let (list, is_list) = match data {
                    Data::List(list) => (list, true),
                    Data::Buffer(buffer) => {
                        let mut list = self.spare.pop().unwrap_or_default();
                        list.push(buffer);
                        (list, false)
                    }
                    other => return Err(Refused { why: NotSubmitted::Data, data: Some(other) }),
                };
                let noted = Noted { is_list, ..noted };
                let mapped = self.transfers.map_sg(at, list, direction).map_err(|error| {
                    let why = NotSubmitted::Map(error.error());
                    let list = error.into_buffer();
                    Refused { why, data: list.map(|list| noted.data_of(list, &mut self.spare)) }
                });
                *self.transfers.work(at) = noted;
                return mapped;
            }
            _ => Err(NotSubmitted::Data),
        };
        match pushed {
            Ok(()) => {
                self.transfers.ask(at);
                *self.transfers.work(at) = Noted { kept: data, ..noted };
                self.note_submitted();
                Ok(())
            }
            Err(why) => Err(Refused { why, data: Some(data) }),
        }
    }

    /// The command, except for its number and its data.
    fn check(&self, space: &Namespace, op: Op, data: &Data<B>) -> Result<Command, NotSubmitted> {
        if let Some(failed) = self.failed {
            return Err(NotSubmitted::Queue(failed));
        }
        let within = |lba: u64, blocks: u64| match lba.checked_add(blocks) {
            Some(end) if end <= space.blocks => Ok(()),
            _ => Err(NotSubmitted::BeyondEnd { lba, blocks, there: space.blocks }),
        };
        let command = Command::new(op.opcode(), space.id);
        match op {
            Op::Flush => Ok(command),
            Op::Deallocate { lba, blocks } => {
                const DEALLOCATE: u32 = 4;
                within(lba, blocks.into())?;
                // One range: word 10 is the zero-based number of ranges.
                Ok(command.word(11, DEALLOCATE))
            }
            Op::Read { lba } | Op::Write { lba } => {
                let (bytes, block) = (data.len(), space.block_bytes());
                if bytes > self.max_transfer {
                    return Err(NotSubmitted::TooLong { bytes, most: self.max_transfer });
                }
                if bytes == 0 || !bytes.is_multiple_of(block) {
                    return Err(NotSubmitted::Blocks { bytes, block });
                }
                let blocks = bytes / block;
                within(lba, blocks)?;
                // At most 4096 blocks of the smallest size: they fit the field's 16 bits.
                Ok(command.pair(10, lba).word(12, blocks as u32 - 1))
            }
        }
    }
}
