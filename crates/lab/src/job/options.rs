//! From lines to jobs.

use std::collections::{HashMap, HashSet};

use super::{
    Job, JobError, JobFile, MAX_FILE, Rw,
    ini::{Line, lines},
    value::{self, quote},
};
use crate::block::MIN_UNIT;

/// Sections a file may have.
pub const MAX_SECTIONS: usize = 1000;
/// Different unknown keys a file may have.
pub const MAX_UNKNOWN: usize = 1000;
/// Largest block, bytes.
pub const MAX_BS: u64 = 16 << 20;
/// Most I/Os in flight of one clone.
pub const MAX_IODEPTH: u64 = 4096;
/// Most clones of one job.
pub const MAX_NUMJOBS: u64 = 1024;
/// The area of a job that gives no `size`. fio takes the whole device; the disk here is as large
/// as the jobs need it to be, so that there is no such thing.
pub const DEFAULT_SIZE: u64 = 1 << 30;

const SYNCHRONOUS: [&str; 6] = ["sync", "psync", "vsync", "pvsync", "pvsync2", "mmap"];

pub(super) fn parse(text: &[u8], file: &str) -> Result<JobFile, JobError> {
    if text.len() > MAX_FILE {
        let what = format!("more than {MAX_FILE} bytes: this is not a job file");
        return Err(JobError::new(file, 0, what));
    }
    let mut reader =
        Reader { file, warnings: Vec::new(), unknown: HashSet::new(), filename: false };
    let mut global = Draft::default();
    let mut current: Option<Draft> = None;
    let mut jobs = Vec::new();
    let (mut sections, mut last) = (0, 1);
    for line in lines(text, file) {
        let (number, line) = line?;
        last = number;
        match line {
            Line::Section(name) => {
                sections += 1;
                if sections > MAX_SECTIONS {
                    let what = format!("more than {MAX_SECTIONS} sections; split the file");
                    return Err(reader.error(number, what));
                }
                reader.close(current.take(), &mut global, &mut jobs)?;
                let mut draft = global.clone();
                draft.section = number;
                draft.is_global = name == "global";
                draft.mixes = [None; 2];
                if !draft.is_global {
                    draft.job.name = name.to_owned();
                }
                current = Some(draft);
            }
            Line::Option { key, value } => {
                let Some(draft) = &mut current else {
                    let key = quote(key);
                    let what = format!("{key} before any section; put it under [global]");
                    return Err(reader.error(number, what));
                };
                reader.option(draft, number, key, value)?;
            }
        }
    }
    reader.close(current, &mut global, &mut jobs)?;
    if jobs.is_empty() {
        return Err(reader.error(last, "no job: give a section [NAME] other than [global]"));
    }
    Ok(JobFile { file: file.to_owned(), jobs, warnings: reader.warnings })
}

/// A section as far as it was read.
#[derive(Clone, Default)]
struct Draft {
    job: Job,
    section: usize,
    is_global: bool,
    /// Where a key got its value, for errors that only show when the section is whole.
    lines: HashMap<String, usize>,
    /// `rwmixread` and `rwmixwrite` as this section gave them.
    mixes: [Option<u8>; 2],
}

impl Draft {
    fn line_of(&self, keys: &[&str]) -> usize {
        keys.iter().filter_map(|key| self.lines.get(*key)).max().copied().unwrap_or(self.section)
    }
}

struct Reader<'a> {
    file: &'a str,
    warnings: Vec<JobError>,
    unknown: HashSet<String>,
    filename: bool,
}

impl Reader<'_> {
    fn error(&self, line: usize, what: impl Into<String>) -> JobError {
        JobError::new(self.file, line, what)
    }

    fn warn(&mut self, line: usize, what: String) {
        self.warnings.push(self.error(line, what));
    }

    /// A section is whole: a `[global]` becomes the default, a job is checked and kept.
    fn close(
        &mut self,
        draft: Option<Draft>,
        global: &mut Draft,
        jobs: &mut Vec<Job>,
    ) -> Result<(), JobError> {
        let Some(draft) = draft else { return Ok(()) };
        if draft.is_global {
            *global = draft;
            return Ok(());
        }
        let job = &draft.job;
        let line = draft.line_of(&["bs", "size", "rw"]);
        let bs = job.max_block();
        if u64::from(bs) > job.size {
            let size = job.size;
            let what =
                format!("a block of {bs} bytes does not fit size {size}; allowed: bs <= size");
            return Err(self.error(line, what));
        }
        if job.offset.checked_add(job.size).is_none() {
            let line = draft.line_of(&["offset", "size"]);
            return Err(self.error(line, "offset plus size is more than 2^64 bytes"));
        }
        if let Some(engine) = job.ioengine.as_deref()
            && SYNCHRONOUS.contains(&engine)
            && job.iodepth > 1
        {
            let what = format!(
                "ioengine={engine} keeps one I/O in flight in fio; here iodepth={} is obeyed",
                job.iodepth
            );
            let line = draft.line_of(&["ioengine", "iodepth"]);
            // Inherited from [global] it is one fact, not one a job.
            if !self.warnings.iter().any(|w| w.line == line && w.what == what) {
                self.warn(line, what);
            }
        }
        jobs.push(draft.job);
        Ok(())
    }

    fn option(
        &mut self,
        draft: &mut Draft,
        line: usize,
        key: &str,
        value: Option<&str>,
    ) -> Result<(), JobError> {
        let known = match key {
            "readwrite" => "rw",
            "blocksize" => "bs",
            "timeout" => "runtime",
            "wait_for_previous" => "stonewall",
            _ => key,
        };
        match self.obey(draft, line, known, value) {
            Ok(true) => draft.lines.insert(known.to_owned(), line),
            Ok(false) => return self.unknown(line, key),
            Err(what) => return Err(self.error(line, format!("{}: {what}", quote(key)))),
        };
        Ok(())
    }

    fn unknown(&mut self, line: usize, key: &str) -> Result<(), JobError> {
        if !self.unknown.insert(key.to_owned()) {
            return Ok(());
        }
        if self.unknown.len() > MAX_UNKNOWN {
            let what = "different unknown keys: this is not a job file";
            return Err(self.error(line, format!("more than {MAX_UNKNOWN} {what}")));
        }
        self.warn(line, format!("{} is not known here and has no effect", quote(key)));
        Ok(())
    }

    /// Obeys a key; false if it is not known.
    fn obey(
        &mut self,
        draft: &mut Draft,
        line: usize,
        key: &str,
        value: Option<&str>,
    ) -> Result<bool, String> {
        let job = &mut draft.job;
        // Flags may stand alone; everything else needs a value.
        let flag = || value::flag(value);
        let value =
            || value.filter(|value| !value.is_empty()).ok_or("needs a value; write KEY=VALUE");
        match key {
            "time_based" => job.time_based = flag()?,
            "stonewall" => job.stonewall = flag()?,
            "norandommap" => job.norandommap = flag()?,
            // The page cache is not used, clones are reported together, and are no processes, in any
            // case.
            "direct" | "group_reporting" | "thread" => drop(flag()?),
            "rw" => job.rw = pattern(value()?)?,
            "bs" => self.block_sizes(job, line, value()?)?,
            "size" => {
                let size = self.size(line, value()?)?;
                if size == 0 {
                    return Err("0 is not allowed; allowed: at least one block".to_owned());
                }
                job.size = size;
            }
            "offset" => {
                let offset = self.size(line, value()?)?;
                if !offset.is_multiple_of(MIN_UNIT.into()) {
                    return Err(format!(
                        "{offset} bytes are not allowed; allowed: multiples of {MIN_UNIT}"
                    ));
                }
                job.offset = offset;
            }
            "iodepth" => job.iodepth = value::number(value()?, 1..=MAX_IODEPTH)? as u32,
            "numjobs" => job.numjobs = value::number(value()?, 1..=MAX_NUMJOBS)? as u32,
            // fio: no limit.
            "runtime" => job.runtime = Some(value::time(value()?)?).filter(|time| !time.is_zero()),
            "rwmixread" | "rwmixwrite" => {
                let percent = value::number(value()?, 0..=100)? as u8;
                let write = key == "rwmixwrite";
                draft.mixes[usize::from(write)] = Some(percent);
                draft.job.rwmixread = if write { 100 - percent } else { percent };
                if let [Some(read), Some(written)] = draft.mixes
                    && read + written != 100
                {
                    let what = "do not make 100: the last one counts, as in fio";
                    let mixes = format!("rwmixread={read} and rwmixwrite={written}");
                    self.warn(line, format!("{mixes} {what}"));
                }
            }
            "filename" => {
                let value = quote(value()?);
                if !std::mem::replace(&mut self.filename, true) {
                    self.warn(line, format!("filename={value} is never opened: --disk decides"));
                }
            }
            "ioengine" => job.ioengine = Some(value()?.to_owned()),
            "verify" => {
                let value = value()?;
                // What jobs that are meant for this ask for.
                if value != "crc32c" {
                    let value = quote(value);
                    let what = "has no effect: every byte read is checked";
                    self.warn(line, format!("verify={value} {what}"));
                }
            }
            // In [global] it names nothing.
            "name" if !draft.is_global => job.name = value()?.to_owned(),
            // For people.
            "name" | "description" => drop(value()?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn size(&mut self, line: usize, text: &str) -> Result<u64, String> {
        let size = value::size(text)?;
        if size.decimal {
            let what = "fio reads ki, mi, gi as powers of 1000, and k, m, g as powers of 1024";
            self.warn(line, format!("{} is {} bytes: {what}", quote(text), size.bytes));
        }
        Ok(size.bytes)
    }

    /// `4k`: all; `4k,64k`: reads, then writes (and trims); an empty part keeps what was.
    fn block_sizes(&mut self, job: &mut Job, line: usize, text: &str) -> Result<(), String> {
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        if parts.len() > 3 || parts.iter().all(|part| part.is_empty()) {
            return Err(format!(
                "{} is not allowed; allowed: a size, or sizes of reads,writes,trims",
                quote(text)
            ));
        }
        let mut sizes = [None; 3];
        for (size, part) in sizes.iter_mut().zip(&parts).filter(|(_, part)| !part.is_empty()) {
            let bytes = self.size(line, part)?;
            if bytes == 0 || bytes > MAX_BS || !bytes.is_multiple_of(MIN_UNIT.into()) {
                return Err(format!(
                    "{bytes} bytes are not allowed; allowed: multiples of {MIN_UNIT} up to {MAX_BS}"
                ));
            }
            *size = Some(bytes as u32);
        }
        job.bs.read = sizes[0].unwrap_or(job.bs.read);
        job.bs.write = sizes[usize::from(parts.len() > 1)].unwrap_or(job.bs.write);
        Ok(())
    }
}

fn pattern(text: &str) -> Result<Rw, String> {
    text.parse().map_err(|_: String| {
        format!(
            "{} is not allowed; allowed: {}, readwrite (no trims, no :N modifiers)",
            quote(text),
            Rw::ALL.map(Rw::name).join(", ")
        )
    })
}
