//! The tests that name rules: a comment counts if it is in a test that is compiled and runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::Id;

/// Where the sources name rules.
#[derive(Default)]
pub(super) struct Found {
    /// Where each rule is named by a test that runs.
    pub(super) tests: BTreeMap<Id, Vec<String>>,
    /// Where rules are named by what never runs, with the reason.
    pub(super) idle: Vec<String>,
}

/// Every comment `// rule L19` or `// rules L31, V15` in the sources of the crates.
pub(super) fn find(root: &Path) -> Result<Found> {
    let mut found = Found::default();
    let crates = root.join("crates");
    let mut compiled = BTreeSet::new();
    for entry in fs::read_dir(&crates).with_context(|| format!("{}", crates.display()))? {
        // A crate may have one within it for its tests.
        let krate = entry?.path();
        for file in [targets(&krate)?, targets(&krate.join("testing"))?].concat() {
            follow(&file, true, &mut compiled)?;
        }
    }
    for file in sources(&crates)? {
        let text = fs::read_to_string(&file)?;
        let name = file.strip_prefix(root).unwrap_or(&file).display().to_string();
        for (line, ids, runs) in named_in(&text) {
            let why = match runs {
                _ if !compiled.contains(&file) => "the file belongs to no test",
                Runs::Yes => {
                    let place = format!("{name}:{line}");
                    ids.iter()
                        .for_each(|id| found.tests.entry(*id).or_default().push(place.clone()));
                    continue;
                }
                Runs::Ignored => "the test is ignored",
                Runs::NoTest => "it stands in no test",
            };
            let ids: Vec<String> = ids.iter().map(Id::to_string).collect();
            found.idle.push(format!("{name}:{line} names {}: {why}", ids.join(", ")));
        }
    }
    Ok(found)
}

/// The files that the targets of a crate with tests begin with.
fn targets(krate: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![krate.join("src/lib.rs"), krate.join("src/main.rs")];
    for folder in ["src/bin", "tests"] {
        let Ok(entries) = fs::read_dir(krate.join(folder)) else { continue };
        for entry in entries {
            let path = entry?.path();
            found.push(if path.is_dir() { path.join("main.rs") } else { path });
        }
    }
    found.retain(|path| path.is_file() && path.extension().is_some_and(|e| e == "rs"));
    Ok(found)
}

/// Notes a file, and those of its modules. `is_root`: it is the first file of a target.
fn follow(file: &Path, is_root: bool, into: &mut BTreeSet<PathBuf>) -> Result<()> {
    if !into.insert(file.to_owned()) {
        return Ok(());
    }
    let text = fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
    let folder = file.parent().context("a file lies in a folder")?;
    let stem = file.file_stem().unwrap_or_default();
    let inner = if is_root || stem == "mod" { folder.to_owned() } else { folder.join(stem) };
    let mut path = None;
    for line in text.lines().map(str::trim) {
        if let Some(there) = line.strip_prefix("#[path = \"").and_then(|l| l.strip_suffix("\"]")) {
            path = Some(plain(&folder.join(there)));
            continue;
        }
        if line.starts_with("#[") || line.starts_with("//") {
            continue;
        }
        let there = path.take();
        let Some(name) = module(line) else { continue };
        let places = match there {
            Some(there) => vec![there],
            None => vec![inner.join(format!("{name}.rs")), inner.join(name).join("mod.rs")],
        };
        for place in places.into_iter().filter(|place| place.is_file()) {
            follow(&place, false, into)?;
        }
    }
    Ok(())
}

/// The name in `mod name;`, whatever its visibility.
fn module(line: &str) -> Option<&str> {
    let (seen_by, name) = line.strip_suffix(';')?.split_once("mod ")?;
    let name = name.trim();
    let is_name = name.chars().all(|c| c.is_alphanumeric() || c == '_');
    (is_name && (seen_by.is_empty() || seen_by.starts_with("pub"))).then_some(name)
}

/// Without `..`.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut whole, part| {
        match part {
            std::path::Component::ParentDir => drop(whole.pop()),
            part => whole.push(part),
        }
        whole
    })
}

/// Whether the code around a comment is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runs {
    Yes,
    Ignored,
    NoTest,
}

/// The comments of a file that name rules: line, rules, and whether the function around it is a
/// test that runs. Nesting is read from the indentation, as rustfmt leaves it.
fn named_in(text: &str) -> Vec<(usize, Vec<Id>, Runs)> {
    let lines: Vec<&str> = text.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let ids = named(line);
        if ids.is_empty() {
            continue;
        }
        let above = (0..at).rev().find(|&above| {
            let there = lines[above];
            indent(there) < indent(line) && is_function(there)
        });
        // Or it is before the test, among its attributes.
        let is_part = |line: &str| line.trim_start().starts_with(['#', '/']);
        let below = (at + 1..lines.len()).find(|&below| !is_part(lines[below]));
        let below = below
            .filter(|&below| indent(lines[below]) == indent(line) && is_function(lines[below]));
        let around = below.or(above);
        let runs = around.map_or(Runs::NoTest, |function| {
            let attributes = lines[..function].iter().rev().map(|line| line.trim());
            let attributes = attributes.take_while(|line| is_part(line));
            let has = |name: &str| {
                let plain = format!("#[{name}]");
                let with_reason = format!("#[{name} = ");
                attributes.clone().any(|line| line == plain || line.starts_with(&with_reason))
            };
            match (has("test"), has("ignore")) {
                (false, _) => Runs::NoTest,
                (true, true) => Runs::Ignored,
                (true, false) => Runs::Yes,
            }
        });
        found.push((at + 1, ids, runs));
    }
    found
}

fn is_function(line: &str) -> bool {
    let words = line.trim_start().split([' ', '(']);
    let first = words.take_while(|word| *word != "fn").collect::<Vec<_>>();
    line.contains("fn ")
        && first.iter().all(|w| ["pub", "crate)", "super)", "unsafe", "const"].contains(w))
}

fn named(line: &str) -> Vec<Id> {
    let Some(comment) = line.trim_start().strip_prefix("// rule") else { return Vec::new() };
    let list = comment.strip_prefix('s').unwrap_or(comment);
    if !list.starts_with(' ') {
        return Vec::new();
    }
    list.split([',', ' ', ':', ';'])
        .map(str::trim)
        .filter(|w| !w.is_empty())
        // Also `rule D21, rule D22`.
        .filter(|w| !["rule", "rules"].contains(w))
        .map_while(Id::parse)
        .collect()
}

fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("{}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(sources(&path)?);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_names_one_rule_or_several() {
        assert_eq!(named("    // rule L19"), [Id('L', 19)]);
        assert_eq!(named("// rules L31, V15: both"), [Id('L', 31), Id('V', 15)]);
        assert_eq!(named("// rule D21, rule D22"), [Id('D', 21), Id('D', 22)]);
        assert_eq!(named("// ruler L19"), []);
        assert_eq!(named("// the rule L19 says"), []);
        assert_eq!(named("let a = 1; // rule L19"), []);
    }

    /// What becomes of a comment after these lines.
    fn runs(before: &str) -> Runs {
        let text = format!("{before}    // rule L1\n}}\n");
        match named_in(&text)[..] {
            [(_, _, runs)] => runs,
            _ => panic!("one comment"),
        }
    }

    #[test]
    fn only_a_test_that_runs_covers_anything() {
        assert_eq!(runs("#[test]\nfn a() {\n"), Runs::Yes);
        assert_eq!(runs("#[test]\n#[should_panic(expected = \"x\")]\nfn a() {\n"), Runs::Yes);
        assert_eq!(runs("#[test]\nfn a(\n    x in 0..3,\n) {\n"), Runs::Yes);
        assert_eq!(runs("#[test]\nfn a() {\n    fn b() {\n    }\n"), Runs::Yes);
        assert_eq!(runs("#[test]\n#[ignore]\nfn a() {\n"), Runs::Ignored);
        assert_eq!(runs("#[test]\n#[ignore = \"slow\"]\nfn a() {\n"), Runs::Ignored);
        assert_eq!(runs("#[ignore = \"slow\"]\n/// Text.\n#[test]\nfn a() {\n"), Runs::Ignored);
        assert_eq!(runs("#[test]\nfn a() {\n}\n\nfn b() {\n"), Runs::NoTest);
        assert_eq!(runs(""), Runs::NoTest);
        let before = |attributes: &str| {
            let text = format!("// rule L1\n{attributes}fn a() {{\n}}\n");
            named_in(&text)[0].2
        };
        assert_eq!(before("/// Text.\n#[test]\n"), Runs::Yes);
        assert_eq!(before("#[test]\n#[ignore]\n"), Runs::Ignored);
        assert_eq!(before(""), Runs::NoTest);
    }

    #[test]
    fn only_what_belongs_to_a_target_covers_anything() {
        let root = std::env::temp_dir().join(format!("ringfence-rules-{}", std::process::id()));
        let test = "#[test]\nfn a() {\n    // rule L1\n}\n";
        let files = [
            ("crates/a/src/lib.rs", "mod b;\npub(crate) mod c;\n"),
            ("crates/a/src/b.rs", "#[cfg(test)]\nmod tests;\n"),
            ("crates/a/src/b/tests.rs", test),
            ("crates/a/src/c/mod.rs", test),
            ("crates/a/src/lost.rs", test),
            ("crates/a/tests/plain.rs", test),
            ("crates/a/tests/many/main.rs", "#[path = \"../far.in\"]\nmod far;\nmod near;\n"),
            ("crates/a/tests/many/near.rs", test),
            ("crates/a/tests/many/lost.rs", test),
        ];
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let found = find(&root);
        fs::remove_dir_all(&root).unwrap();
        let found = found.unwrap();
        let places = found.tests[&Id('L', 1)].join(" ");
        for named in ["b/tests.rs", "c/mod.rs", "plain.rs", "near.rs"] {
            assert!(places.contains(named), "{named}: {places}");
        }
        assert!(!places.contains("lost"), "{places}");
        assert_eq!(found.idle.len(), 2, "{:?}", found.idle);
    }
}
