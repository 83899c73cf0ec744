//! Job files: whatever the bytes, the result is jobs that keep to their limits, or an error with a
//! line of the file; and jobs that are written out are read back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ringfence_lab::{
    job::{JobFile, MAX_IODEPTH, MAX_NUMJOBS},
    workload::Workload,
};

fuzz_target!(|text: &[u8]| match JobFile::parse(text, "fuzz.fio") {
    Ok(file) => {
        assert!(!file.jobs.is_empty());
        let stages = JobFile::stages(&file.jobs);
        assert_eq!(stages.iter().map(|stage| stage.len()).sum::<usize>(), file.jobs.len());
        for job in &file.jobs {
            assert!((1..=MAX_IODEPTH).contains(&job.iodepth.into()));
            assert!((1..=MAX_NUMJOBS).contains(&job.numjobs.into()));
            for io in Workload::new(job, 0, 1).take(16) {
                let end = io.offset.checked_add(io.len.into()).expect("no offset wraps");
                assert!(io.offset >= job.offset && end <= job.offset + job.size);
            }
        }
    }
    Err(error) => {
        let lines = text.split(|byte| *byte == b'\n').count();
        assert!(error.line <= lines, "{error}");
    }
});
