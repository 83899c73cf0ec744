//! `cargo xtask house`: how large the house is, where it is `unsafe`, and which files import each other.
//!
//! What counts as a line of the product: one below `crates/*/src` that is neither blank nor a comment, and is not
//! compiled for tests alone. Sources are as rustfmt leaves them, by which the end of an item is found.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{
    circles,
    workspace::{Package, crates, root},
};

const COUNTS: &str = "xtask/house.toml";
/// A file with more lines needs a reason.
const LONG: usize = 700;

/// The counts in the tree: a change that does not update them fails.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct House {
    /// The most lines of product that there may be.
    most_lines: usize,
    /// How often `unsafe` occurs in the product of each crate that has it.
    r#unsafe: BTreeMap<String, usize>,
    /// Why a file is longer than others.
    long: BTreeMap<String, String>,
}

impl fmt::Display for House {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# How large the house may be: see xtask/src/house.rs. Counts are by `cargo xtask house --update`."
        )?;
        writeln!(f, "most_lines = {}\n\n[unsafe]", self.most_lines)?;
        self.r#unsafe.iter().try_for_each(|(name, count)| writeln!(f, "{name} = {count}"))?;
        writeln!(f, "\n[long]")?;
        self.long.iter().try_for_each(|(path, why)| writeln!(f, "{path:?} = {why:?}"))
    }
}

/// What one file has.
#[derive(Debug, Default, PartialEq)]
struct Found {
    /// Lines of any kind.
    all: usize,
    lines: usize,
    r#unsafe: usize,
    /// Modules in files of their own that are compiled for tests alone.
    tests: BTreeSet<String>,
}

/// Prints the counts. Fails if they differ from the tree's, or with `update` writes them there;
/// fails in any case if files import each other, directly or not.
pub(crate) fn check(update: bool) -> Result<()> {
    let text = fs::read_to_string(root().join(COUNTS)).unwrap_or_default();
    let mut house: House = toml::from_str(&text).context(COUNTS)?;
    let mut wrong = Vec::new();
    let (mut all, mut found, mut table) = (0, BTreeMap::new(), String::new());
    let mut long = BTreeSet::new();
    // Not the crate within another, which is for tests.
    let of_the_product = |folder: &&Path| folder.parent() == Some(&root().join("crates"));
    let crates = crates()?;
    for folder in crates.iter().map(Package::folder).filter(of_the_product) {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        let mut sum = Found::default();
        for (file, found) in files(&folder.join("src"))? {
            sum.lines += found.lines;
            sum.r#unsafe += found.r#unsafe;
            let path = file.strip_prefix(root()).unwrap_or(&file).display().to_string();
            if found.all > LONG {
                long.insert(path);
            }
        }
        for circle in circles::of(&folder.join("src"))? {
            wrong.push(format!("files of {name} import each other: {}", circle.join(" ")));
        }
        all += sum.lines;
        let _ = writeln!(table, "{name:20} {:6} {:6}", sum.lines, sum.r#unsafe);
        if sum.r#unsafe > 0 {
            found.insert(name.clone(), sum.r#unsafe);
        }
    }
    println!("{:20} {:>6} {:>6}\n{table}{:20} {all:6}", "crate", "lines", "unsafe", "all");
    if update {
        house.most_lines = all;
        house.r#unsafe = found;
        house.long.retain(|path, _| long.contains(path));
        fs::write(root().join(COUNTS), house.to_string())?;
    } else {
        if all > house.most_lines {
            wrong.push(format!("{all} lines of product, and there may be {}", house.most_lines));
        }
        if found != house.r#unsafe {
            wrong.push(format!("`unsafe` stands {found:?} times, and not {:?}", house.r#unsafe));
        }
    }
    let known: BTreeSet<String> = house.long.keys().cloned().collect();
    wrong.extend(long.difference(&known).map(|path| {
        format!("{path} has more than {LONG} lines: cut it, or say why in {COUNTS}, [long]")
    }));
    wrong.extend(
        known
            .difference(&long)
            .map(|path| format!("{path} is in {COUNTS}, [long], and is not long any more")),
    );
    if !wrong.is_empty() {
        bail!(
            "{}\nIf that is meant, `cargo xtask house --update` puts it into {COUNTS}: commit it, and say why",
            wrong.join("\n")
        );
    }
    Ok(())
}

/// What a folder holds, by name.
fn entries(of: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(of).with_context(|| of.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// The product's files below a folder.
fn files(folder: &Path) -> Result<Vec<(PathBuf, Found)>> {
    let mut all = Vec::new();
    let mut left_out = BTreeSet::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for path in entries(&folder)? {
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let found = look(&fs::read_to_string(&path)?);
                // Its children are in a folder of its name, or beside it if it is its folder's own
                // module.
                let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
                let children = match name {
                    "lib" | "main" | "mod" => folder.clone(),
                    name => folder.join(name),
                };
                left_out.extend(found.tests.iter().map(|test| children.join(test)));
                all.push((path, found));
            }
        }
    }
    all.retain(|(path, _)| {
        !path.ancestors().any(|part| left_out.contains(&part.with_extension("")))
    });
    Ok(all)
}

/// Counts a file's part of the product.
fn look(text: &str) -> Found {
    let mut found = Found { all: text.lines().count(), ..Found::default() };
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let code = line.trim_start();
        if is_for_tests(code) {
            let indent = line.len() - code.len();
            skip_item(&mut lines, indent, &mut found.tests);
            continue;
        }
        if code.is_empty() || code.starts_with("//") {
            continue;
        }
        found.lines += 1;
        let code = code.split(" // ").next().unwrap_or_default();
        let words = code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        // Not the names of lints.
        found.r#unsafe += words.filter(|word| *word == "unsafe").count();
    }
    found
}

fn is_for_tests(code: &str) -> bool {
    ["#[cfg(test)]", "#[cfg(all(test", "#[cfg(any(test", "#[cfg(loom)]"]
        .iter()
        .any(|cfg| code.starts_with(cfg))
}

/// Skips an item whose attribute was read; keeps the name of a module in a file of its own.
fn skip_item<'a>(
    lines: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
    indent: usize,
    tests: &mut BTreeSet<String>,
) {
    let mut first = true;
    for line in lines {
        let code = line.trim_start();
        if first && (code.starts_with("#[") || code.starts_with("//")) {
            continue;
        }
        if std::mem::take(&mut first) {
            let module = code.strip_suffix(';').and_then(|code| code.split("mod ").nth(1));
            tests.extend(module.map(str::to_owned));
            if code.ends_with(';') || code.ends_with(',') {
                return;
            }
        } else if line.len() - code.len() == indent && code.starts_with(['}', ')', ']']) {
            // A signature over several lines goes on.
            if !code.ends_with('{') {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
//! A module.

use a::b;
#[cfg(test)]
mod own;
#[cfg(all(test, loom))]
#[path = \"m.rs\"]
pub(crate) mod model;
/// Says.
unsafe fn f() {
    // SAFETY: none.
    unsafe { g() } // unsafe
}
struct S {
    a: u8,
    #[cfg(test)]
    b: u8,
}
#[cfg(test)]
fn of(
    a: u8,
) -> u8 {
    a
}
#[cfg(test)]
mod tests {
    use super::*;
}
const LAST: u8 = 1;
";

    #[test]
    fn lines_of_tests_do_not_count() {
        let tests = BTreeSet::from(["own", "model"].map(String::from));
        assert_eq!(look(TEXT), Found { all: 29, lines: 8, r#unsafe: 2, tests });
    }
}
