//! The tables in README.md come from real runs: this makes them again.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};

/// Replaces the text between `<!-- run: COMMAND -->` and `<!-- end -->` in README.md by a code
/// block with what the command prints; those whose command contains `only`, if that is given.
pub(crate) fn regenerate(only: Option<&str>) -> Result<()> {
    let file = crate::steps::root().join("README.md");
    let text = fs::read_to_string(&file).context("README.md")?;
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    let mut count = 0;
    while let Some((before, after)) = rest.split_once("<!-- run: ") {
        let (command, after) =
            after.split_once(" -->").context("README.md: `run:` without `-->`")?;
        let (old, after) =
            after.split_once("<!-- end -->").context("README.md: no `<!-- end -->`")?;
        out.push_str(before);
        rest = after;
        if only.is_some_and(|only| !command.contains(only)) {
            out.push_str(&format!("<!-- run: {command} -->{old}<!-- end -->"));
            continue;
        }
        println!("running: {command}");
        let output = Command::new("sh")
            .args(["-c", command])
            .current_dir(crate::steps::root())
            .stderr(std::process::Stdio::inherit())
            .output()?;
        if !output.status.success() {
            bail!("{command}: {}", output.status);
        }
        let printed = String::from_utf8(output.stdout).context("the output is not UTF-8")?;
        out.push_str(&format!(
            "<!-- run: {command} -->\n```text\n{}\n```\n<!-- end -->",
            printed.trim_end()
        ));
        count += 1;
    }
    out.push_str(rest);
    if count == 0 {
        bail!("README.md has no `<!-- run: COMMAND -->` with {:?}", only.unwrap_or_default());
    }
    fs::write(&file, out)?;
    println!("{count} blocks regenerated");
    Ok(())
}
