//! Fault reports (rules V28 to V30).

use crate::{
    kit::{
        ACCESS,
        bench::{Bench, Reached, Stop, Verdict, applies, not_applicable},
    },
    wire::{F_ADDRESS, FAULT_LEN, RawFault},
};
use zerocopy::{FromBytes, IntoBytes};

checks! {
    4 Should "reset-forgets-faults" => reset_forgets,
        "after a device reset no report comes of what was before (virtio 2.4)";
    28 May "fault-report" => report,
        "what a refused access is reported as";
    28 Should "fault-reserved" => reserved,
        "the reserved fields of a report are zero";
    28 Should "fault-flags" => flags,
        "the undefined flags of a report are zero";
    28 Should "fault-endpoint" => endpoint,
        "a report names the endpoint";
    28 Must "fault-address" => address,
        "a report that has an address has that of the access";
    29 Must "no-event-buffer" => no_buffer,
        "faults without a buffer to report them in hold up nothing: they wait or are dropped";
    29 Should "small-event-buffer" => small_buffer,
        "a report is not spread over several buffers that are too small";
    30 May "needs-reset" => needs_reset,
        "an internal error that concerns no endpoint sets DEVICE_NEEDS_RESET";
}

const UNDEFINED: u32 = !0x103;

/// How many reports from before a reset are discarded.
const STALE: usize = 1000;

/// Has an attached endpoint read where nothing is mapped, with a buffer waiting: the endpoint, the
/// address, the report.
fn fault(bench: &mut Bench<'_>) -> Result<(u32, u64, RawFault), Stop> {
    let (_, endpoint) = bench.attached(0, 0)?;
    bench.post(64)?;
    // A check of its own covers that a reset drops waiting faults.
    for _ in 0..STALE {
        match bench.event()? {
            None => break,
            Some(_) => bench.post(64)?,
        }
    }
    let (at, _) = bench.pages(5, 5);
    applies(bench.reach(endpoint, at, false)? == Reached::Nothing, "the access is not refused")?;
    let Some(event) = bench.event()? else { return not_applicable("the device reports no fault") };
    match RawFault::read_from_prefix(&event.bytes) {
        Ok((report, _)) if event.used as usize >= FAULT_LEN => Ok((endpoint, at, report)),
        _ => not_applicable(format!("a report of {} bytes, in a format of its own", event.used)),
    }
}

fn reset_forgets(bench: &mut Bench<'_>) -> Verdict {
    let (endpoint, at, _) = fault(bench)?;
    // No buffer is posted for these.
    for _ in 0..4 {
        bench.reach(endpoint, at, false)?;
    }
    bench.start(bench.wanted())?;
    bench.post(64)?;
    let event = bench.event()?;
    bench.holds(event.is_none(), "a report", "none")
}

fn report(bench: &mut Bench<'_>) -> Verdict {
    let (_, _, report) = fault(bench)?;
    bench.note(format!("reason {}, flags {:#x}", report.reason, report.flags))
}

fn reserved(bench: &mut Bench<'_>) -> Verdict {
    let (_, _, report) = fault(bench)?;
    let zero = report.reserved == [0; 3] && report.reserved1 == 0;
    bench.holds(zero, format!("{:x?}", report.as_bytes()), "zeroes")
}

fn flags(bench: &mut Bench<'_>) -> Verdict {
    let (_, _, report) = fault(bench)?;
    let flags = report.flags.get();
    bench.holds(flags & UNDEFINED == 0, format!("{flags:#x}"), "no flags but 0x103")
}

fn endpoint(bench: &mut Bench<'_>) -> Verdict {
    let (endpoint, _, report) = fault(bench)?;
    bench.holds(report.endpoint == endpoint, report.endpoint, endpoint)
}

fn address(bench: &mut Bench<'_>) -> Verdict {
    let (_, at, report) = fault(bench)?;
    applies(report.flags.get() & F_ADDRESS != 0, "the report has no address")?;
    let named = report.address.get();
    let within = (at..at + ACCESS as u64).contains(&named);
    bench.holds(within, format!("{named:#x}"), format!("{at:#x}"))
}

fn no_buffer(bench: &mut Bench<'_>) -> Verdict {
    // Whether there are reports at all.
    let (endpoint, at, _) = fault(bench)?;
    for _ in 0..20 {
        applies(bench.reach(endpoint, at, true)? == Reached::Nothing, "the access is not refused")?;
    }
    let domain = bench.domain(0)?;
    bench.map(domain, bench.pages(1, 1), bench.phys(0))?;
    bench.post(64)?;
    // What waited comes now, else this.
    bench.reach(endpoint, at, true)?;
    let event = bench.event()?;
    bench.holds(event.is_some(), "no report any more", "a report")
}

fn small_buffer(bench: &mut Bench<'_>) -> Verdict {
    let (endpoint, at, _) = fault(bench)?;
    for _ in 0..4 {
        bench.post(8)?;
    }
    bench.reach(endpoint, at, false)?;
    let mut written = 0;
    while let Some(event) = bench.event()? {
        let (used, len) = (event.used as usize, event.bytes.len());
        bench.holds(used <= len, format!("used length {used}"), len)?;
        written += usize::from(event.used > 0);
    }
    bench.holds(written <= 1, format!("{written} buffers for one report"), "one at most")
}

fn needs_reset(_: &mut Bench<'_>) -> Verdict {
    not_applicable("an internal error cannot be caused from outside")
}
