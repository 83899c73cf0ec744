//! Opening recordings: files, pipes, standard input.

use std::{
    fs::{File, OpenOptions},
    io::ErrorKind,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};

use super::{
    lines::Stoppable,
    recording::{ReadError, Recording},
};
use crate::{progress::Kind, run::Usage};

/// How often the progress of a long recording is reported.
const BETWEEN_LINES: Duration = Duration::from_secs(2);

/// Reads recordings, each with its name; `-` is standard input. What is wrong with one is reported
/// at once, and kept in `warnings`. `stop` ends it early.
///
/// # Errors
/// A file cannot be read, or is not a recording ([`Usage`]).
pub(crate) fn read_all(
    traces: &[PathBuf],
    progress: Kind,
    stop: &Arc<AtomicBool>,
    warnings: &mut Vec<String>,
) -> Result<Vec<(String, Recording)>> {
    let stdin = traces.iter().filter(|trace| trace.as_os_str() == "-").count();
    if stdin > 1 {
        return Err(Usage("- is given twice: standard input can be read once".to_owned()).into());
    }
    let mut recordings = Vec::new();
    for trace in traces {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let file = trace.display().to_string();
        let mut reported = Instant::now();
        let mut report = |lines: u64| {
            if progress != Kind::Silent && reported.elapsed() > BETWEEN_LINES {
                reported = Instant::now();
                eprintln!("reading {file}: {lines} lines so far");
            }
        };
        let recording = match read(trace, stop, &mut report) {
            Ok(recording) => recording,
            Err(_) if stop.load(Ordering::Relaxed) => break,
            Err(error) => return Err(error),
        };
        for warning in recording.warnings(&file) {
            if progress != Kind::Silent {
                eprintln!("{warning}");
            }
            warnings.push(warning);
        }
        recordings.push((file, recording));
    }
    Ok(recordings)
}

fn read(trace: &Path, stop: &Arc<AtomicBool>, report: &mut dyn FnMut(u64)) -> Result<Recording> {
    let name = trace.display();
    let usage = |error: std::io::Error| match error.kind() {
        ErrorKind::IsADirectory => Usage(format!("{name} is a directory, not a recording")).into(),
        _ => anyhow!(error).context(format!("reading {name}")),
    };
    let file = if trace.as_os_str() == "-" {
        // A descriptor of our own: it is closed when all is read.
        File::from(rustix::io::dup(std::io::stdin()).map_err(std::io::Error::from).map_err(usage)?)
    } else {
        // A FIFO is opened without waiting for its writer: a later wait can be ended by Ctrl-C.
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(trace)
            .with_context(|| Usage(format!("cannot read {name}")))?
    };
    Recording::read(Stoppable::new(file, stop), stop, report).map_err(|error| match error {
        ReadError::NotARecording(why) => Usage(format!("{name} is not a recording: {why}")).into(),
        ReadError::Io(error) => usage(error),
    })
}
