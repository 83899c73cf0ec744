//! A crate imports only from floors below it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{crates, output, root};

/// Where the floors are written down.
const PAGE: &str = "ARCHITECTURE.md";

/// The laboratory, which the command for hosts does without.
const LAB: &str = "ringfence-lab";

/// Fails on a crate without a floor, or one that imports from its own floor or from above, or if
/// the command for hosts links the laboratory. What a crate uses only in its tests may come from
/// anywhere.
pub(crate) fn check(command: &str) -> Result<()> {
    let floors = read(&fs::read_to_string(root().join(PAGE)).context(PAGE)?)?;
    let (mut wrong, crates) = (Vec::new(), crates()?);
    for package in &crates {
        let name = &package.name;
        let Some(own) = floors.get(name) else {
            wrong.push(format!("{name} has no floor in {PAGE}"));
            continue;
        };
        for import in package.imports().filter(|import| import.starts_with("ringfence")) {
            match floors.get(import) {
                None => wrong.push(format!("{name} imports {import}, which has no floor")),
                Some(floor) if floor >= own => {
                    wrong.push(format!("{name} (floor {own}) imports {import} (floor {floor})"));
                }
                _ => {}
            }
        }
    }
    let known = |name: &str| crates.iter().any(|package| package.name == name);
    let gone = floors.keys().filter(|name| !known(name));
    wrong.extend(gone.map(|name| format!("{PAGE} has a floor for {name}, which is no crate")));
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    println!("{} crates, each imports from floors below it only", crates.len());
    let all = linked(command, &[])?;
    let hosts = linked(command, &["--no-default-features"])?;
    println!("{command} links {} crates, {} without its laboratory", all.len(), hosts.len());
    if !all.contains(LAB) || hosts.contains(LAB) {
        bail!(
            "{LAB} is what the feature `lab` of {command} has, which is on by default, and nothing else"
        );
    }
    Ok(())
}

/// The crates that a package links.
fn linked(package: &str, features: &[&str]) -> Result<BTreeSet<String>> {
    let mut tree = Command::new("cargo");
    tree.args(["tree", "--package", package, "--edges", "normal", "--prefix", "none"])
        .args(["--format", "{p}"])
        .args(features)
        .current_dir(root());
    let text = output(&mut tree)?;
    Ok(text.lines().filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect())
}

/// The floor of each crate: rows `| 2 | `dma` | what it is |` of the page.
fn read(text: &str) -> Result<BTreeMap<String, u32>> {
    let mut floors = BTreeMap::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", floor, name, ..] = cells[..] else { continue };
        let (Ok(floor), Some(name)) = (floor.parse(), name.strip_prefix('`')) else { continue };
        let name = match name.trim_end_matches('`') {
            "ringfence" => "ringfence".to_owned(),
            name => format!("ringfence-{name}"),
        };
        ensure!(floors.insert(name, floor).is_none(), "{PAGE}: {line}: it has a floor already");
    }
    Ok(floors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_floors_is_read() {
        let text =
            "| floor | crate | what |\n|---|---|---|\n| 7 | `ringfence` | a |\n| 2 | `dma` | b |\n";
        let floors = [("ringfence".to_owned(), 7), ("ringfence-dma".to_owned(), 2)];
        assert_eq!(read(text).unwrap(), BTreeMap::from(floors));
        assert!(read(&text.replace("ringfence", "dma")).is_err(), "twice");
    }
}
