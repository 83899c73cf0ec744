//! The tables in README.md and docs/ come from real runs: this makes them again.

use std::{
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    steps::{TABLES, commit},
    workspace::root,
};

/// Replaces the text between `<!-- run: COMMAND -->` and `<!-- end -->` by a code block with the
/// command, what it prints, and the commit; those whose command contains `only`, if that is given.
pub(crate) fn regenerate(only: Option<&str>) -> Result<()> {
    // Before a file is written: of an unchanged tree it says so.
    let made = commit("")?.trim().replace('\n', "; ");
    let mut count = 0;
    for name in TABLES {
        let file = root().join(name);
        let text = fs::read_to_string(&file).with_context(|| name.to_owned())?;
        if !text.contains("<!-- run: ") {
            bail!("{name} has no `<!-- run: COMMAND -->`");
        }
        let (mut out, mut rest) = (String::with_capacity(text.len()), text.as_str());
        while let Some((before, after)) = rest.split_once("<!-- run: ") {
            let parts = after.split_once(" -->").and_then(|(command, after)| {
                after.split_once("<!-- end -->").map(|(old, after)| (command, old, after))
            });
            let Some((command, old, after)) = parts else {
                bail!("{name}: `<!-- run: COMMAND -->` without `<!-- end -->`");
            };
            out.push_str(before);
            rest = after;
            let block = match only.is_some_and(|only| !command.contains(only)) {
                true => old.to_owned(),
                false => {
                    count += 1;
                    run(command, &made)?
                }
            };
            out.push_str(&format!("<!-- run: {command} -->{block}<!-- end -->"));
        }
        out.push_str(rest);
        fs::write(&file, out)?;
    }
    if count == 0 {
        bail!(
            "no `<!-- run: COMMAND -->` with {:?} in {}",
            only.unwrap_or_default(),
            TABLES.join(", ")
        );
    }
    println!("{count} blocks regenerated");
    Ok(())
}

/// The code block of a command, which was `made` at a commit.
fn run(command: &str, made: &str) -> Result<String> {
    println!("running: {command}");
    let output = Command::new("sh")
        .args(["-c", command])
        .current_dir(root())
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        bail!("{command}: {}", output.status);
    }
    let printed = String::from_utf8(output.stdout).context("the output is not UTF-8")?;
    Ok(format!("\n```text\n$ {command}\n# {made}\n\n{}\n```\n", printed.trim_end()))
}
