//! How much memory may be locked or pinned, and huge pages.

use serde::Serialize;

use super::{
    check::{Check, Purpose, State, bytes},
    tree::Tree,
};

/// The bit of CAP_IPC_LOCK in a set of capabilities.
const IPC_LOCK: u32 = 14;

/// How much memory this user may lock.
#[derive(Debug, Serialize)]
pub(super) struct Memlock {
    /// RLIMIT_MEMLOCK, bytes; `None`: no limit.
    soft: Option<u64>,
    hard: Option<u64>,
    /// CAP_IPC_LOCK, which lifts any limit.
    capability: bool,
    /// In a user namespace, where capabilities count only inside of it.
    user_namespace: bool,
    /// What this user's processes have locked (VmLck) and pinned (VmPin), bytes.
    locked: u64,
    pinned: u64,
}

impl Memlock {
    /// `None`: there is no procfs.
    pub(super) fn read(tree: &Tree) -> Option<Memlock> {
        let (soft, hard) = limits(&tree.text("proc/self/limits")?)?;
        let status = tree.text("proc/self/status").unwrap_or_default();
        let user = field(&status, "Uid:");
        let (mut locked, mut pinned) = (0u64, 0u64);
        for name in tree.names("proc") {
            if !name.starts_with(|c: char| c.is_ascii_digit()) {
                break; // Numbers come first.
            }
            let Some(status) = tree.text(&format!("proc/{name}/status")) else { continue };
            if field(&status, "Uid:") == user {
                locked = locked.saturating_add(kilobytes(&status, "VmLck:"));
                pinned = pinned.saturating_add(kilobytes(&status, "VmPin:"));
            }
        }
        let effective = field(&status, "CapEff:").and_then(|set| u64::from_str_radix(set, 16).ok());
        let map = tree.text("proc/self/uid_map").unwrap_or_default();
        let map: Vec<&str> = map.split_whitespace().collect();
        Some(Memlock {
            soft,
            hard,
            capability: effective.is_some_and(|set| set >> IPC_LOCK & 1 == 1),
            user_namespace: !map.is_empty() && map != ["0", "0", "4294967295"],
            locked,
            pinned,
        })
    }

    /// What is left after all that is pinned now: io_uring's pins are counted per user, type1's
    /// mappings per process, and a new program may run into either.
    fn left(&self, limit: Option<u64>) -> u64 {
        limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.pinned))
    }
}

/// Whether `wanted` bytes can be pinned.
pub(super) fn memlock(memlock: Option<&Memlock>, wanted: u64) -> Check {
    const FOR: &[Purpose] = &[Purpose::Vfio, Purpose::Pin];
    let check = |state, found: String| Check::new("memlock", FOR, state, found);
    let Some(memlock) = memlock else {
        return check(State::Unknown, "no /proc/self/limits here".into())
            .remedy("Mount procfs:", ["mount -t proc proc /proc"]);
    };
    let limit = |limit: Option<u64>| limit.map_or("no limit".to_owned(), bytes);
    let used = match (memlock.locked, memlock.pinned) {
        (0, 0) => "this user has nothing locked or pinned".to_owned(),
        (locked, pinned) => {
            format!("this user has {} locked, {} pinned", bytes(locked), bytes(pinned))
        }
    };
    if memlock.capability && !memlock.user_namespace {
        return check(
            State::Ok,
            format!("no limit, by CAP_IPC_LOCK (RLIMIT_MEMLOCK {}; {used})", limit(memlock.soft)),
        );
    }
    let found = format!(
        "RLIMIT_MEMLOCK {} (hard: {}), {used}, {} wanted",
        limit(memlock.soft),
        limit(memlock.hard),
        bytes(wanted)
    );
    if memlock.left(memlock.soft) >= wanted {
        return check(State::Ok, found);
    }
    let total = wanted.saturating_add(memlock.pinned);
    let kib = total.div_ceil(1024);
    let mut check = check(State::Lack, found);
    if memlock.left(memlock.hard) >= wanted {
        check = check.remedy("In this shell, as yourself:", [format!("ulimit -S -l {kib}")]);
    } else {
        check = check.remedy(
            "In this shell, which then has it:",
            [format!("sudo prlimit --pid $$ --memlock={0}:{0}", kib.saturating_mul(1024))],
        );
    }
    check = check
        .remedy(
            "For users who log in (and log in again):",
            [format!("echo 'USER - memlock {kib}' > /etc/security/limits.d/70-ringfence.conf")],
        )
        .remedy(
            "For a service:",
            [format!("systemctl edit SERVICE   # [Service] LimitMEMLOCK={}K", kib)],
        )
        .remedy(
            "For a container:",
            [format!("docker run --ulimit memlock={0}:{0} ...", kib.saturating_mul(1024))],
        );
    if memlock.user_namespace {
        check.advice("CAP_IPC_LOCK of a user namespace does not count: the limit holds.")
    } else {
        check.remedy("Without any limit:", ["setcap cap_ipc_lock+ep PROGRAM"])
    }
}

/// Huge pages of a size.
#[derive(Debug, Serialize)]
pub(super) struct HugePages {
    /// Bytes of one.
    size: u64,
    total: u64,
    /// Neither used nor reserved.
    free: u64,
}

impl HugePages {
    pub(super) fn read(tree: &Tree) -> Vec<HugePages> {
        let folder = "sys/kernel/mm/hugepages";
        let mut sizes: Vec<HugePages> = tree
            .names(folder)
            .iter()
            .filter_map(|name| {
                let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
                let number = |file: &str| tree.number(&format!("{folder}/{name}/{file}"));
                let promised = number("resv_hugepages").unwrap_or(0);
                Some(HugePages {
                    size: kib.parse::<u64>().ok()?.checked_mul(1024)?,
                    total: number("nr_hugepages")?,
                    free: number("free_hugepages")?.saturating_sub(promised),
                })
            })
            .collect();
        sizes.sort_by_key(|pages| pages.size);
        sizes
    }
}

/// The mode of transparent huge pages: `always`, `madvise` or `never`.
pub(super) fn transparent(tree: &Tree) -> Option<String> {
    let text = tree.word("sys/kernel/mm/transparent_hugepage/enabled")?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Nothing needs huge pages. Memory in huge pages is pinned in fewer steps, and an IOMMU translates
/// it with fewer entries.
pub(super) fn huge_pages(reserved: &[HugePages], transparent: Option<&str>) -> Check {
    const FOR: &[Purpose] = &[Purpose::Vfio, Purpose::Pin];
    let describe = |pages: &HugePages| {
        format!("{} of {} pages of {} free", pages.free, pages.total, bytes(pages.size))
    };
    let mut found: Vec<String> = reserved.iter().map(describe).collect();
    found.push(format!("transparent: {}", transparent.unwrap_or("not in this kernel")));
    let any = reserved.iter().any(|pages| pages.free > 0);
    let check = Check::new("huge-pages", FOR, State::Note, found.join("; "));
    if any || matches!(transparent, Some("always" | "madvise")) {
        return Check { state: State::Ok, ..check };
    }
    let check = check.advice("Nothing needs them; pinning and translating cost less with them.");
    let check = match transparent {
        Some(_) => check.remedy(
            "Transparent ones, for memory that asks for them (madvise):",
            ["echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"],
        ),
        None => check,
    };
    match reserved.first() {
        Some(pages) => check.remedy(
            "Reserved ones:",
            [format!(
                "echo COUNT > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
                pages.size / 1024
            )],
        ),
        None => check,
    }
}

/// The soft and the hard limit of locked memory, bytes.
fn limits(text: &str) -> Option<(Option<u64>, Option<u64>)> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    let mut words = line.split_whitespace();
    let mut limit = || match words.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some((limit()?, limit()?))
}

/// The first word of a field of /proc/PID/status.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()
}

fn kilobytes(status: &str, name: &str) -> u64 {
    let number: Option<u64> = field(status, name).and_then(|word| word.parse().ok());
    number.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::tree::MadeUp;

    const MIB: u64 = 1 << 20;

    fn host(soft: &str, hard: &str, capabilities: &str, pinned: &str) -> MadeUp {
        let limits = format!(
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory {soft} {hard} bytes\n"
        );
        let status = format!("Uid:\t1000\t1000\nVmPin:\t {pinned} kB\nCapEff:\t{capabilities}\n");
        MadeUp::new(&[
            ("proc/self/limits", &limits),
            ("proc/self/status", &status),
            ("proc/self/uid_map", "         0          0 4294967295\n"),
            ("proc/7/status", &status),
            ("proc/8/status", "Uid:\t0\t0\nVmPin:\t 4096 kB\n"),
            ("proc/sys/x", ""),
        ])
    }

    fn check(made: &MadeUp, wanted: u64) -> Check {
        memlock(Memlock::read(&made.tree()).as_ref(), wanted)
    }

    #[test]
    fn the_limit_holds_to_the_byte() {
        let made = host("8388608", "8388608", "0", "0");
        assert_eq!(check(&made, 8 * MIB).state, State::Ok);
        let lack = check(&made, 8 * MIB + 1);
        assert_eq!(lack.state, State::Lack);
        let commands: Vec<&String> = lack.remedies.iter().flat_map(|r| &r.commands).collect();
        assert!(commands.iter().any(|c| c.contains("--memlock=8389632:8389632")), "{commands:?}");
        assert!(commands.iter().any(|c| c.contains("LimitMEMLOCK=8193K")), "{commands:?}");
    }

    #[test]
    fn what_the_user_pins_is_taken_off_and_what_others_pin_is_not() {
        let made = host("8388608", "unlimited", "0", "4096");
        assert_eq!(check(&made, 4 * MIB).state, State::Ok);
        let lack = check(&made, 5 * MIB);
        assert_eq!(lack.state, State::Lack);
        assert_eq!(lack.remedies[0].commands, ["ulimit -S -l 9216"]);
    }

    #[test]
    fn a_capability_lifts_the_limit_unless_it_is_a_namespaces_own() {
        let made = host("65536", "65536", "000001fffeffffff", "0");
        assert_eq!(check(&made, u64::MAX).state, State::Ok);
        made.file("proc/self/uid_map", "0 1000 1\n");
        let lack = check(&made, u64::MAX);
        assert_eq!(lack.state, State::Lack);
        assert!(lack.remedies.iter().any(|remedy| remedy.text.contains("user namespace")));
        // Every capability but this one.
        let made = host("65536", "65536", "000001ffffffbfff", "0");
        assert_eq!(check(&made, MIB).state, State::Lack);
    }

    #[test]
    fn limits_that_cannot_be_read_are_unknown() {
        assert_eq!(check(&MadeUp::new(&[]), 1).state, State::Unknown);
        for garbage in ["", "Max locked memory", "Max locked memory x y", "Max locked memory -1 7"]
        {
            let made = MadeUp::new(&[("proc/self/limits", garbage)]);
            assert_eq!(check(&made, 1).state, State::Unknown, "{garbage}");
        }
        let made = host("unlimited", "unlimited", "zzz", "99999999999999999999999");
        assert_eq!(check(&made, u64::MAX).state, State::Ok);
    }

    #[test]
    fn free_huge_pages_are_those_without_a_reservation() {
        let folder = "sys/kernel/mm/hugepages/hugepages-2048kB";
        let made = MadeUp::new(&[
            (&format!("{folder}/nr_hugepages"), "8\n"),
            (&format!("{folder}/free_hugepages"), "5\n"),
            (&format!("{folder}/resv_hugepages"), "5\n"),
            ("sys/kernel/mm/hugepages/hugepages-xkB/nr_hugepages", "8\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ]);
        let pages = HugePages::read(&made.tree());
        assert_eq!((pages.len(), pages[0].size, pages[0].total, pages[0].free), (1, 2 * MIB, 8, 0));
        let mode = transparent(&made.tree());
        assert_eq!(mode.as_deref(), Some("never"));
        let check = huge_pages(&pages, mode.as_deref());
        assert_eq!(check.state, State::Note);
        assert!(check.remedies.iter().any(|r| r.commands.iter().any(|c| c.contains("2048kB"))));
        assert_eq!(huge_pages(&pages, Some("madvise")).state, State::Ok);
    }
}
