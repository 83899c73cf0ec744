//! What ARCHITECTURE.md names: files that exist, and in the rows of its tables functions of these files.

use std::fs;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::root;

const PAGE: &str = "ARCHITECTURE.md";

pub(crate) fn check() -> Result<()> {
    let text = fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    let (mut wrong, mut count) = (Vec::new(), 0);
    for line in text.lines() {
        let mut sources = String::new();
        for path in names(line).filter(|name| is_path(name)) {
            let files = [root().join("crates").join(path), root().join(path)];
            match files.iter().find(|file| file.exists()) {
                Some(file) if file.is_file() => sources.push_str(&fs::read_to_string(file)?),
                Some(_) => {}
                None => wrong.push(format!("there is no {path}")),
            }
        }
        if !line.starts_with('|') || sources.is_empty() {
            continue;
        }
        for name in names(line) {
            let Some((_, function)) = name.rsplit_once("::") else { continue };
            count += 1;
            let defined = |end| sources.contains(&format!("fn {function}{end}"));
            if !defined("(") && !defined("<") {
                wrong.push(format!("no file of its row has {name}"));
            }
        }
    }
    if !wrong.is_empty() {
        bail!("{PAGE}: {}", wrong.join("; "));
    }
    ensure!(count > 0, "{PAGE} names no function");
    println!("{PAGE}: {count} functions are where it says");
    Ok(())
}

/// What stands in back-quotes.
fn names(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

fn is_path(name: &str) -> bool {
    name.contains('/') && !name.contains(' ') && (name.ends_with(".rs") || name.ends_with('/'))
}
