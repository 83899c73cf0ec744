//! The back ends, as the benchmark uses them: started once, and used again and again.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use ringfence_run::worker::Notify;

use super::{
    case::{Case, Direction, Topic},
    testpmd::{Console, Counted},
};
use crate::bench::process::Process;

/// A running back end, stopped while it is not used.
pub(super) struct End {
    /// The back end, and its proxy if there is one.
    pub(super) processes: Vec<Process>,
    socket: PathBuf,
    /// Ours: whether it loops frames back, and whether there is a proxy if that is compared.
    way: Option<(bool, Option<bool>)>,
    /// The console that controls DPDK's.
    console: Option<Console>,
}

/// Starts this very program as `name` on `cpu`, at a socket of that `place`, a folder and a name; and a
/// proxy before it, if one is wanted, which waits like that. Returns them, and where a driver connects.
pub(in crate::bench) fn ours(
    name: &'static str,
    arguments: &[&str],
    (folder, place): (&Path, &str),
    cpu: usize,
    proxy: Option<Notify>,
) -> Result<(Vec<Process>, PathBuf)> {
    let program = std::env::current_exe().context("where this program is")?;
    let mut socket = folder.join(format!("{place}.sock"));
    let path = socket.display().to_string();
    let arguments = arguments.iter().copied().chain(["--socket", &path]);
    let arguments: Vec<String> = arguments.map(str::to_owned).collect();
    let back = Process::start(name, &program, &arguments, Some(cpu), &socket, false)?;
    let mut processes = vec![back];
    if let Some(notify) = proxy {
        let back = std::mem::replace(&mut socket, folder.join(format!("{place}.front")));
        processes.push(Process::proxy(&back, &socket, notify, Some(cpu))?);
    }
    Ok((processes, socket))
}

/// Ours, one for each way of use. `proxies`: those with a proxy, too, and those that they are
/// compared with.
pub(super) fn ringfence(folder: &Path, cpu: usize, proxies: bool) -> Result<Vec<End>> {
    let proxies = if proxies { &[None, Some(false), Some(true)][..] } else { &[None] };
    let ways = proxies.iter().flat_map(|proxy| [true, false].map(|loops| (loops, *proxy)));
    let ends = ways.map(|(loops, proxy)| {
        let way = if loops { "--loopback" } else { "--probe" };
        let kind = proxy.map_or("", |on| if on { ".back" } else { ".direct" });
        // Polls, as testpmd does; beside a proxy it would keep the CPU that both have.
        let notify = if proxy.is_some() { "adaptive" } else { "poll" };
        let arguments = ["net", way, "--notify", notify, "--log", "info"];
        let place = (folder, &*format!("ringfence{way}{kind}"));
        let before = (proxy == Some(true)).then_some(Notify::Adaptive);
        let (processes, socket) = ours("ringfence net", &arguments, place, cpu, before)?;
        processes.iter().try_for_each(Process::pause)?;
        Ok(End { processes, socket, way: Some((loops, proxy)), console: None })
    });
    ends.collect()
}

/// DPDK's.
pub(super) fn testpmd(folder: &Path, cpu: usize) -> Result<Vec<End>> {
    let socket = folder.join("testpmd.sock");
    let (process, console) = Console::start(&socket, cpu)?;
    let (processes, console) = (vec![process], Some(console));
    Ok(vec![End { processes, socket, way: None, console }])
}

/// The one that a case uses.
pub(super) fn choose<'e>(ends: &'e mut [End], case: &Case) -> &'e mut End {
    let proxy = if let Topic::Proxy(on) = case.topic { Some(on) } else { None };
    let way = (case.direction == Direction::Loop, proxy);
    let is_it = |end: &&mut End| end.way.is_none_or(|own| own == way);
    ends.iter_mut().find(is_it).expect("an end for each way of use")
}

impl End {
    /// A connection to it.
    ///
    /// # Errors
    /// It does not listen.
    pub(super) fn connect(&self) -> Result<UnixStream> {
        let path = &self.socket;
        UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))
    }

    /// Makes it carry packets in `direction`.
    ///
    /// # Errors
    /// It has ended, or does not respond.
    pub(super) fn begin(&mut self, direction: Direction) -> Result<()> {
        let End { processes, console, .. } = self;
        console.iter_mut().try_for_each(|console| console.begin(&mut processes[0], direction))
    }

    /// Makes it stop; returns what it has counted since [`begin`](Self::begin), if it reports that.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    pub(super) fn end(&mut self) -> Result<Option<Counted>> {
        let End { processes, console, .. } = self;
        console.as_mut().map(|console| console.end(&mut processes[0])).transpose()
    }
}
