//! Our own back end: this very program.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ringfence_run::worker::Notify;

use super::{
    backend::{Backend, Counted},
    case::{Case, Direction},
};
use crate::bench::process::Process;

/// Running back ends, `ringfence net`, one for each way of use. Those that are not used are stopped.
pub(super) struct Ringfence {
    ends: Vec<End>,
    /// The one that is used.
    used: usize,
}

struct End {
    /// The back end, and its proxy if there is one.
    processes: Vec<Process>,
    socket: PathBuf,
    /// With `--loopback`, or with `--probe`.
    loops: bool,
    proxy: Option<bool>,
}

impl Ringfence {
    /// `proxies`: those with a proxy, too, and those that they are compared with.
    pub(super) fn start(folder: &Path, cpu: usize, proxies: bool) -> Result<Ringfence> {
        let proxies = if proxies { &[None, Some(false), Some(true)][..] } else { &[None] };
        let ways = proxies.iter().flat_map(|proxy| [true, false].map(|loops| (loops, *proxy)));
        let ends = ways.map(|(loops, proxy)| End::start(folder, cpu, loops, proxy));
        Ok(Ringfence { ends: ends.collect::<Result<_>>()?, used: 0 })
    }
}

impl End {
    fn start(folder: &Path, cpu: usize, loops: bool, proxy: Option<bool>) -> Result<End> {
        let program = std::env::current_exe().context("where this program is")?;
        let way = if loops { "--loopback" } else { "--probe" };
        let name = format!(
            "ringfence{way}{}",
            proxy.map_or("", |on| if on { ".back" } else { ".direct" })
        );
        let mut socket = folder.join(format!("{name}.sock"));
        let path = socket.display().to_string();
        // Polls, as testpmd does; beside a proxy it would keep the CPU that both have.
        let notify = if proxy.is_some() { "adaptive" } else { "poll" };
        let arguments = ["net", way, "--notify", notify, "--log", "info", "--socket", &path];
        let arguments = arguments.map(str::to_owned);
        let start =
            Process::start("ringfence net", &program, &arguments, Some(cpu), &socket, false);
        let mut processes = vec![start?];
        processes[0].pause()?;
        if proxy == Some(true) {
            let back = std::mem::replace(&mut socket, folder.join(format!("{name}.front")));
            let proxy = Process::proxy(&back, &socket, Notify::Adaptive, Some(cpu))?;
            proxy.pause()?;
            processes.push(proxy);
        }
        Ok(End { processes, socket, loops, proxy })
    }
}

impl Backend for Ringfence {
    fn processes(&mut self) -> &mut [Process] {
        &mut self.ends[self.used].processes
    }

    fn choose(&mut self, case: &Case) {
        let loops = case.direction == Direction::Loop;
        let is_it = |end: &End| (end.loops, end.proxy) == (loops, case.proxy);
        self.used = self.ends.iter().position(is_it).expect("an end for each way of use");
    }

    fn begin(&mut self, _: Direction) -> Result<()> {
        Ok(())
    }

    fn socket(&self) -> &Path {
        &self.ends[self.used].socket
    }

    fn end(&mut self) -> Result<Option<Counted>> {
        Ok(None)
    }
}
