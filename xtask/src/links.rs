//! Links within the tree: each leads to a file, and to a heading of it.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{output, root};

pub(crate) fn check() -> Result<()> {
    let listed = output(Command::new("git").args(["ls-files", "*.md"]).current_dir(root()))?;
    let (mut broken, mut count) = (Vec::new(), 0);
    for name in listed.lines() {
        let file = root().join(name);
        let text = fs::read_to_string(&file).with_context(|| name.to_owned())?;
        for link in links(&text) {
            count += 1;
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let folder = file.parent().context("a file has a folder")?;
            let target = if path.is_empty() { file.clone() } else { folder.join(path) };
            if !target.exists() || !heading.is_empty() && !has_heading(&target, heading)? {
                broken.push(format!("{name}: {link}"));
            }
        }
    }
    if !broken.is_empty() {
        bail!("links that lead nowhere:\n{}", broken.join("\n"));
    }
    ensure!(count > 0, "no link was found in any page");
    println!("{count} links lead to files and headings");
    Ok(())
}

/// The lines of a text, each with whether marks of Markdown are read there: not in code.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut code = false;
    text.lines().map(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence, line)
    })
}

fn prose(text: &str) -> impl Iterator<Item = &str> {
    lines(text).filter_map(|(is_prose, line)| is_prose.then_some(line))
}

/// The targets of links but those of the web.
pub(crate) fn links(text: &str) -> impl Iterator<Item = &str> {
    prose(text)
        .flat_map(|line| line.split("](").skip(1))
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .filter(|target| !target.contains("://"))
}

/// Whether a heading of the file has this anchor, as GitHub makes them.
fn has_heading(file: &Path, anchor: &str) -> Result<bool> {
    let text = fs::read_to_string(file)?;
    let headings = prose(&text).filter(|line| line.starts_with('#'));
    Ok(headings.map(|line| slug(line.trim_start_matches('#').trim())).any(|slug| slug == anchor))
}

fn slug(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_in_code_and_to_the_web_are_left_out() {
        let text = "[a](x.md#one-two) ![b](c.svg) [w](https://e.org)\n```\n[n](no.md)\n```\n";
        assert_eq!(links(text).collect::<Vec<_>>(), ["x.md#one-two", "c.svg"]);
    }

    #[test]
    fn a_heading_becomes_its_anchor() {
        assert_eq!(slug("MAP and UNMAP, `strict+map`"), "map-and-unmap-strictmap");
    }
}
