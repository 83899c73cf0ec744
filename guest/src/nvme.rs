//! A user-space driver of an NVMe disk, inside a guest, over VFIO: what the controller may reach is
//! what the kernel was asked to map, page by page.
//!
//! `vfio-nvme PCI-ADDRESS GROUP MODE...` does, one after the other:
//!
//! * `verify`: writes and reads under each policy, in several sizes and depths;
//! * `isolation`: has the controller use an address that is mapped no longer;
//! * `hold`: maps much, keeps the controller busy, and says `holding` until it is killed;
//! * `iops`: reads at random with each way of mapping (see `nvme_speed.rs`).
//!
//! A line for each thing that was found in order; the first that is not ends the program with an error.

#[path = "nvme_speed.rs"]
mod speed;

use std::{env, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use ringfence_dma::{
    BounceLimits, BouncePools, Device, Direction, DmaConfig, HostMemory, Policy, Segment,
};
use ringfence_drivers::nvme::{
    Buffer, Completion, Controller, ControllerConfig, Data, IoQueue, Namespace, Op,
};
use ringfence_iova::{Aperture, Slabs};
use ringfence_sync::cpu::OsCpu;
use ringfence_vfio::{
    Tuning, Type1,
    kernel::{Attached, Bar, Container, Device as VfioDevice, Group},
};

type Domain = Arc<Type1<Attached>>;
type Space = Arc<Slabs<OsCpu>>;
type Disk = Controller<Domain, Space, Bar>;
type Queue<B = Buffer> = IoQueue<Domain, Space, Bar, B>;

const PAGE: usize = 4096;

/// The device, and the domain that it is in.
struct Machine {
    device: VfioDevice,
    domain: Domain,
}

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let mut next = |what| arguments.next().with_context(|| format!("{what} is missing"));
    let (address, group) = (next("the device's PCI address")?, next("its group")?);
    let container = Container::open()?.attach(Group::open(group.parse()?)?)?;
    let device = container.device(&address)?;
    // One that cannot be reset this way is reset by its driver.
    let _ = device.reset();
    device.set_bus_master(true)?;
    let domain = Arc::new(Type1::new(container, Tuning::default())?);
    let machine = Machine { device, domain };
    for mode in arguments {
        match mode.as_str() {
            "verify" => verify(&machine)?,
            "isolation" => isolation(&machine)?,
            "hold" => hold(&machine)?,
            "iops" => speed::run(&machine)?,
            _ => bail!("{mode}?"),
        }
        let left = machine.domain.usage();
        ensure!(left.mappings == 0 && left.mismatches == 0, "{mode} leaves {left:?}");
    }
    println!("over");
    Ok(())
}

impl Machine {
    /// The driver of the disk, under a policy.
    fn start(&self, config: DmaConfig) -> Result<Disk> {
        let policy = config.policy;
        let aperture = Aperture::new(0, (1 << 39) - 1, PAGE as u64)?;
        let space = Arc::new(Slabs::new(aperture, OsCpu::new()));
        let (for_pools, its_space) = (Arc::clone(&self.domain), Arc::clone(&space));
        let limits = BounceLimits { max_bytes: 32 << 20, ..BounceLimits::default() };
        let pools = BouncePools::new(for_pools, its_space, HostMemory, limits)?;
        let device = Device::builder(Arc::clone(&self.domain)).allocator(space);
        let device = device.config(config).pools(&pools).build()?;
        // Nothing can be deferred here: what is lazy is strict, and says so.
        ensure!(
            device.effective_policy() == policy.to_strict()
                && device.fallback().is_some() == policy.is_lazy(),
            "{policy} became {} because of {:?}",
            device.effective_policy(),
            device.fallback()
        );
        let config =
            ControllerConfig { limit: Duration::from_secs(20), ..ControllerConfig::default() };
        Ok(Controller::start(device, self.device.bar(0)?, config)?)
    }
}

fn first(disk: &Disk) -> Result<Namespace> {
    disk.namespaces().first().copied().context("a disk without a namespace")
}

fn queue(disk: &Disk, depth: u32) -> Result<Queue> {
    Ok(disk.queue(depth)?)
}

fn buffer(len: usize) -> Result<Buffer> {
    Buffer::new(len).context("no memory")
}

fn good(completion: Completion<Buffer>) -> Result<Data<Buffer>> {
    let Completion { token, data, outcome } = completion;
    outcome.with_context(|| format!("command {token}"))?;
    Ok(data)
}

/// Reads back what was written, under each policy that there is over a kernel.
fn verify(machine: &Machine) -> Result<()> {
    let mut seed = 0;
    for policy in Policy::ALL.into_iter().filter(|policy| *policy != Policy::Off) {
        let disk = machine.start(DmaConfig::new(policy))?;
        if seed == 0 {
            println!("model {:?} serial {:?}", disk.identity().model, disk.identity().serial);
        }
        let space = first(&disk)?;
        for depth in [1, 32] {
            let mut queue = queue(&disk, depth)?;
            for size in [512, 4096, 20480, 65536, 512 << 10] {
                seed += 1;
                let size = size.min(queue.max_transfer() as usize);
                round(&mut queue, &space, size, seed)?;
            }
            let flushed = queue.carry_out(&space, Op::Flush, Data::None)?;
            good(flushed)?;
        }
        persistent(&disk, &space)?;
        disk.shut_down()?;
        println!("verified {policy}");
    }
    Ok(())
}

/// As many commands at a time as there is room for, up to 4 MiB in all.
fn round(queue: &mut Queue, space: &Namespace, size: usize, seed: usize) -> Result<()> {
    let count = 2 * queue.room().min((2 << 20) / size);
    let lba = |at: u64| at * size as u64 / space.block_bytes();
    for write in [true, false] {
        let (mut begun, mut over) = (0, 0);
        while over < count {
            while begun < count && queue.room() > 0 {
                let mut data = buffer(size)?;
                if write {
                    data.copy_from_slice(&pattern(size, seed + begun));
                }
                let lba = lba(begun as u64);
                let op = if write { Op::Write { lba } } else { Op::Read { lba } };
                let submitted = queue.submit(space, op, Data::Buffer(data), begun as u64);
                submitted.map_err(|refused| refused.why)?;
                begun += 1;
            }
            queue.publish()?;
            let mut result = Ok(());
            over += queue.reap(|completion| {
                let token = completion.token as usize;
                let checked = good(completion).and_then(|data| {
                    let back = data.into_buffer().context("another kind of data")?;
                    let same = write || back[..] == pattern(size, seed + token);
                    ensure!(same, "command {token} of {size} bytes is not what was written");
                    Ok(())
                });
                if let Err(error) = checked {
                    result = Err(error);
                }
            })?;
            result?;
            queue.pause();
        }
    }
    Ok(())
}

/// The same through memory that stays mapped.
fn persistent(disk: &Disk, space: &Namespace) -> Result<()> {
    let (parts, part) = (16, PAGE as u64);
    let arena = buffer(parts as usize * PAGE)?;
    let arena = disk.device().map_persistent(arena, Direction::Bidirectional);
    let arena = Arc::new(arena.map_err(|error| error.error())?);
    let mut queue = queue(disk, 16)?;
    for n in 0..parts {
        let data = Data::Persistent(Arc::clone(&arena), n * part..(n + 1) * part);
        let lba = n * part / space.block_bytes();
        queue.submit(space, Op::Read { lba }, data, n).map_err(|refused| refused.why)?;
    }
    let mut result = Ok(());
    queue.finish(|completion| {
        if let Err(error) = good(completion) {
            result = Err(error);
        }
    })?;
    result?;
    let arena = Arc::into_inner(arena).context("the arena is still in use")?;
    let arena = arena.unmap().map_err(|error| error.error())?;
    let data = Data::Buffer(buffer(arena.len())?);
    let whole = good(queue.carry_out(space, Op::Read { lba: 0 }, data)?)?;
    let same = whole.into_buffer().is_some_and(|whole| whole[..] == arena[..]);
    ensure!(same, "persistent memory has something else");
    Ok(())
}

/// What is not mapped any more is out of the controller's reach, both ways.
fn isolation(machine: &Machine) -> Result<()> {
    let disk = machine.start(DmaConfig::new(Policy::StrictMap))?;
    let (space, mut queue) = (first(&disk)?, queue(&disk, 4)?);
    let (public, secret) = (pattern(PAGE, 1), pattern(PAGE, 2));
    let with = |bytes: &[u8]| -> Result<Data<Buffer>> {
        let mut data = buffer(bytes.len())?;
        data.copy_from_slice(bytes);
        Ok(Data::Buffer(data))
    };
    // Both places have public data.
    for lba in [0, 64] {
        good(queue.carry_out(&space, Op::Write { lba }, with(&public)?)?)?;
    }
    // The page's address, which the controller has used.
    let mapped = disk.device().map(buffer(PAGE)?, Direction::Bidirectional);
    let mapped = mapped.map_err(|error| error.error())?;
    let at = Segment { addr: mapped.iova().0, len: PAGE as u64 };
    good(queue.carry_out(&space, Op::Read { lba: 0 }, Data::At(at))?)?;
    let mut page = mapped.unmap().map_err(|error| error.error())?;
    ensure!(page[..] == public, "the controller did not write to a mapped page");
    page.copy_from_slice(&secret);
    println!("address {:#x}", at.addr);
    for _ in 0..3 {
        // QEMU's controller may call such a command a success. What counts is where the bytes are.
        for op in [Op::Read { lba: 0 }, Op::Write { lba: 64 }] {
            let ended = queue.carry_out(&space, op, Data::At(at))?;
            println!("{op:?} at an address that was unmapped: {:?}", ended.outcome);
        }
    }
    ensure!(page[..] == secret, "the controller wrote to a page that was unmapped");
    let back = good(queue.carry_out(&space, Op::Read { lba: 64 }, Data::Buffer(buffer(PAGE)?))?)?;
    let back = back.into_buffer().context("another kind of data")?;
    ensure!(back[..] != secret, "a page that was unmapped is on the disk");
    println!("unmapped is out of reach");
    // The queue still works, and the page is in reach once it is mapped again.
    good(queue.carry_out(&space, Op::Write { lba: 64 }, Data::Buffer(page))?)?;
    let back = good(queue.carry_out(&space, Op::Read { lba: 64 }, Data::Buffer(buffer(PAGE)?))?)?;
    let back = back.into_buffer().context("another kind of data")?;
    ensure!(back[..] == secret, "the page was mapped again and not read");
    println!("mapped again is in reach");
    Ok(())
}

/// Pins much, and has the controller write there, until it is killed.
fn hold(machine: &Machine) -> Result<()> {
    let disk = machine.start(DmaConfig::new(Policy::StrictMap))?;
    let (space, mut queue) = (first(&disk)?, queue(&disk, 32)?);
    let arena = disk.device().map_persistent(buffer(32 << 20)?, Direction::FromDevice);
    let _arena = arena.map_err(|error| error.error())?;
    for round in 0.. {
        if round == 3 {
            println!("holding");
        }
        while queue.room() > 0 {
            let data = Data::Buffer(buffer(16 * PAGE)?);
            queue.submit(&space, Op::Read { lba: 0 }, data, 0).map_err(|refused| refused.why)?;
        }
        queue.publish()?;
        let mut result = Ok(());
        queue.reap(|completion| {
            if let Err(error) = good(completion) {
                result = Err(error);
            }
        })?;
        result?;
    }
    Ok(())
}

/// Bytes that say where they belong.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    let mut state = (len as u64) << 32 ^ (seed as u64 + 1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state ^ state >> 29
    };
    let mut bytes = vec![0; len];
    bytes
        .chunks_mut(8)
        .for_each(|chunk| chunk.copy_from_slice(&next().to_le_bytes()[..chunk.len()]));
    bytes
}
