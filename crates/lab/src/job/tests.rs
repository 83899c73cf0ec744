use proptest::prelude::*;

use super::*;

/// The keys that are obeyed or noted.
const KEYS: [&str; 24] = [
    "rw",
    "readwrite",
    "bs",
    "blocksize",
    "size",
    "offset",
    "iodepth",
    "numjobs",
    "runtime",
    "timeout",
    "time_based",
    "rwmixread",
    "rwmixwrite",
    "direct",
    "filename",
    "ioengine",
    "group_reporting",
    "verify",
    "stonewall",
    "wait_for_previous",
    "name",
    "description",
    "norandommap",
    "thread",
];

fn parse(text: &str) -> JobFile {
    JobFile::parse(text.as_bytes(), "t.fio").unwrap_or_else(|error| panic!("{error}"))
}

fn error(text: &str) -> JobError {
    JobFile::parse(text.as_bytes(), "t.fio").expect_err(text)
}

#[test]
fn the_seeds_job_is_read_whole() {
    let file = JobFile::seed();
    let [multi, page] = file.jobs.as_slice() else { panic!("two jobs: {file:?}") };
    assert_eq!((multi.name.as_str(), page.name.as_str()), ("randwrite_multi", "randrw_page"));
    assert_eq!(
        (multi.rw, multi.bs.write, multi.numjobs, multi.iodepth),
        (Rw::RandWrite, 65536, 16, 16)
    );
    assert_eq!((page.rw, page.bs.read, page.numjobs, page.iodepth), (Rw::RandRw, 4096, 1, 128));
    assert_eq!((page.rwmixread, page.size), (50, 1 << 30));
    assert!(multi.time_based);
    assert_eq!(multi.runtime, Some(Duration::from_secs(10)));
    assert_eq!(JobFile::stages(&file.jobs), [0..1, 1..2]);
    assert_eq!(file.warnings.len(), 1, "only the filename: {:?}", file.warnings);
}

#[test]
fn every_example_is_read_without_a_warning_but_for_its_filename() {
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
    let mut seen = 0;
    for entry in std::fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "fio") {
            let file = JobFile::load(&path).unwrap_or_else(|error| panic!("{error}"));
            assert!(file.warnings.iter().all(|w| w.what.contains("--disk")), "{:?}", file.warnings);
            seen += 1;
        }
    }
    assert!(seen >= 3);
}

#[test]
fn a_later_global_changes_only_later_jobs_and_keeps_what_it_does_not_name() {
    let file = parse("[global]\nbs=8k\niodepth=4\n[a]\n[global]\niodepth=2\n[b]\nbs=512\n[a]\n");
    let seen: Vec<_> = file.jobs.iter().map(|j| (j.name.as_str(), j.bs.read, j.iodepth)).collect();
    assert_eq!(seen, [("a", 8192, 4), ("b", 512, 2), ("a", 8192, 2)]);
}

#[test]
fn aliases_and_bare_keys_mean_what_fio_means() {
    let file = parse(
        "[global]\nreadwrite = randread\nblocksize=64kb\n[a]\ndirect\nstonewall\ntime_based=0\n\
         timeout=500ms\n[b]\nrw=readwrite\nbs=4k,64k\n[c]\nrw=write\nbs=,16k\n",
    );
    let [a, b, c] = file.jobs.as_slice() else { panic!() };
    assert!(a.stonewall && !a.time_based && a.rw == Rw::RandRead);
    assert_eq!(a.runtime, Some(Duration::from_millis(500)));
    assert_eq!(b.bs, BlockSizes { read: 4096, write: 65536 });
    assert_eq!((b.rw, c.bs), (Rw::Rw, BlockSizes { read: 65536, write: 16384 }));
    assert!(file.warnings.is_empty());
}

#[test]
fn jobs_run_together_until_one_says_stonewall() {
    let stages = |text| JobFile::stages(&parse(text).jobs);
    assert_eq!(stages("[a]\n[b]\n[c]\n"), vec![0..3]);
    assert_eq!(stages("[a]\n[b]\nstonewall\n[c]\n[d]\nwait_for_previous\n"), [0..1, 1..3, 3..4]);
    assert_eq!(stages("[global]\nstonewall\n[a]\n[b]\nstonewall=0\n[c]\n"), [0..2, 2..3]);
    assert!(JobFile::stages(&[]).is_empty());
}

#[test]
fn an_unknown_key_gives_one_warning_with_the_line_of_its_first_use() {
    let file = parse("[global]\nramp_time=5\n[a]\nlog_avg_msec\nramp_time=7\n[b]\nramp_time=9\n");
    let seen: Vec<_> = file.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        seen,
        [
            "t.fio:2: \"ramp_time\" is not known here and has no effect",
            "t.fio:4: \"log_avg_msec\" is not known here and has no effect",
        ]
    );
    assert_eq!(file.jobs[0], Job { name: "a".into(), ..Job::default() });
}

#[test]
fn a_filename_is_reported_once() {
    let file = parse("[global]\nfilename=/dev/nvme0n1\n[a]\n[b]\nfilename=/dev/sdb\n");
    assert_eq!(file.warnings.len(), 1);
    assert!(file.warnings[0].to_string().starts_with("t.fio:2: filename="));
}

#[test]
fn a_mix_that_does_not_make_100_follows_its_last_word() {
    let mix = |text| parse(text).jobs[0].rwmixread;
    assert_eq!(mix("[a]\nrwmixread=70\nrwmixwrite=30\n"), 70);
    assert_eq!(mix("[a]\nrwmixwrite=10\n"), 90);
    let file = parse("[a]\nrwmixread=70\nrwmixwrite=50\n");
    assert_eq!((file.jobs[0].rwmixread, file.warnings.len()), (50, 1));
    // An override of [global] is no contradiction.
    assert!(parse("[global]\nrwmixread=70\n[a]\nrwmixwrite=50\n").warnings.is_empty());
}

#[test]
fn other_verifications_are_named() {
    assert!(parse("[a]\nverify=crc32c\n").warnings.is_empty());
    assert!(parse("[a]\nverify=md5\n").warnings[0].what.contains("is checked"));
}

#[test]
fn a_wrong_value_is_an_error_with_its_line_and_what_is_allowed() {
    for (text, line) in [
        ("[a]\nrw=fastread\n", 2),
        ("[a]\nrw=randrw:8\n", 2),
        ("[a]\nrw=\n", 2),
        ("[a]\nbs\n", 2),
        ("[a]\nbs=1000\n", 2),
        ("[a]\nbs=0\n", 2),
        ("[a]\nbs=4ki\n", 2),
        ("[a]\nbs=4k-8k\n", 2),
        ("[a]\nbs=1,2,3,4\n", 2),
        ("[a]\nbs=1g\n", 2),
        ("\n[a]\nsize=0\n", 3),
        ("[a]\nsize=10%\n", 2),
        ("[a]\niodepth=0\n", 2),
        ("[a]\nnumjobs=0\n", 2),
        ("[a]\nnumjobs=many\n", 2),
        ("[a]\nrwmixread=101\n", 2),
        ("[a]\ndirect=yes\n", 2),
        ("[a]\nruntime=soon\n", 2),
        ("[a]\noffset=100\n", 2),
        ("[global]\nbs=64k\n[a]\nsize=4k\n[b]\n", 4),
        ("[a]\nsize=4k\nrw=write\nbs=64k\n", 4),
    ] {
        let error = error(text);
        assert_eq!(error.line, line, "{text}: {error}");
        let message = error.to_string();
        assert!(
            message.contains("allow")
                || message.contains("write KEY=VALUE")
                || message.contains("give"),
            "{message}"
        );
        assert!(message.starts_with(&format!("t.fio:{line}: ")), "{message}");
    }
}

#[test]
fn only_block_sizes_that_are_used_must_fit() {
    assert_eq!(parse("[a]\nrw=read\nbs=4k,64k\nsize=8k\n").jobs[0].max_block(), 4096);
}

#[test]
fn a_file_without_jobs_is_an_error() {
    for text in ["", "# nothing\n", "[global]\nbs=4k\n"] {
        assert!(error(text).what.contains("no job"));
    }
    assert!(error("bs=4k\n[a]\n").what.contains("before any section"));
}

#[test]
fn a_huge_file_meets_a_limit_and_says_which() {
    assert!(error(&"[a]\n".repeat(MAX_SECTIONS + 1)).what.contains("sections"));
    assert!(error(&"x".repeat(MAX_FILE + 1)).what.contains("not a job file"));
    assert!(error(&format!("[a]\n{}", "x".repeat(1_000_000))).what.contains("at most 8192"));
    let keys: String = (0..=MAX_UNKNOWN).map(|n| format!("k{n}=1\n")).collect();
    assert!(error(&format!("[a]\n{keys}")).what.contains("unknown keys"));
    assert_eq!(parse(&"[a]\n".repeat(MAX_SECTIONS)).jobs.len(), MAX_SECTIONS);
}

#[test]
fn a_file_that_is_not_there_is_an_error_that_names_it() {
    let error = JobFile::load(Path::new("/nonexistent/x.fio")).unwrap_err();
    assert!(error.to_string().starts_with("/nonexistent/x.fio: "), "{error}");
}

fn block() -> impl Strategy<Value = u32> {
    (1u32..=256).prop_map(|n| n * 512)
}

prop_compose! {
    fn any_job()(
        name in "[a-zA-Z_][a-zA-Z0-9_.#; -]{0,20}[a-z]",
        rw in prop::sample::select(Rw::ALL.to_vec()),
        read in block(), write in block(),
        size in (1u64 << 17)..(1 << 40),
        offset in (0u64..1000).prop_map(|n| n * 512),
        iodepth in 1u32..=4096, numjobs in 1u32..=1024,
        runtime in prop::option::of((1u64..1 << 40).prop_map(Duration::from_micros)),
        rwmixread in 0u8..=100,
        flags in any::<[bool; 3]>(),
    ) -> Job {
        Job {
            name, rw, bs: BlockSizes { read, write }, size, offset, iodepth, numjobs, runtime,
            rwmixread, ioengine: None,
            time_based: flags[0], stonewall: flags[1], norandommap: flags[2],
        }
    }
}

/// A job as a section of a job file.
fn section(job: &Job) -> String {
    let Job { name, rw, bs, size, offset, iodepth, numjobs, rwmixread, .. } = job;
    let mut text = format!(
        "[{name}]\nrw={rw}\nbs={},{}\nsize={size}\noffset={offset}\niodepth={iodepth}\n\
         numjobs={numjobs}\nrwmixread={rwmixread}\ndirect\ngroup_reporting\nverify=crc32c\n",
        bs.read, bs.write
    );
    text.extend(job.runtime.map(|runtime| format!("runtime={}us\n", runtime.as_micros())));
    for (key, set) in [
        ("time_based", job.time_based),
        ("stonewall", job.stonewall),
        ("norandommap", job.norandommap),
    ] {
        text += &format!("{key}={}\n", u8::from(set));
    }
    text
}

proptest! {
    #[test]
    fn what_is_emitted_is_read_back(jobs in prop::collection::vec(any_job(), 1..5)) {
        prop_assume!(jobs.iter().all(|job| job.name != "global"));
        let text: String = jobs.iter().map(section).collect();
        prop_assert_eq!(parse(&text).jobs, jobs);
    }

    #[test]
    fn no_bytes_panic(text in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = JobFile::parse(&text, "t.fio");
    }

    #[test]
    fn nothing_that_looks_like_a_job_file_panics(
        lines in prop::collection::vec(
            (prop::sample::select(KEYS.to_vec()), "[=, ]{0,2}[0-9a-z%:,.x-]{0,24}"), 0..30),
    ) {
        let text: String = std::iter::once("[a]\n".to_owned())
            .chain(lines.iter().map(|(key, value)| format!("{key}{value}\n")))
            .collect();
        if let Ok(file) = JobFile::parse(text.as_bytes(), "t.fio") {
            for job in &file.jobs {
                prop_assert!(u64::from(job.max_block()) <= job.size);
                prop_assert!(job.iodepth > 0 && job.numjobs > 0 && job.rwmixread <= 100);
            }
        }
    }
}
