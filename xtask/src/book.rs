//! `cargo xtask book`: README.md, docs/ and the other pages as a site.
//!
//! mdBook takes pages from one folder, and links between pages work where the pages lie as they do in
//! the tree. So they are copied, each to its place; what links lead to besides is in the repository.

use std::{
    collections::BTreeSet,
    fmt::Write,
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    links::{lines, links},
    tools::tool,
    workspace::{packages, root, run},
};

const MDBOOK: &str = "0.5.4";
const SUMMARY: &str = "docs/SUMMARY.md";
/// As in book.toml.
const SOURCE: &str = "target/book-source";
const SITE: &str = "target/book";

/// Makes the site, and checks that its links lead somewhere.
///
/// # Errors
/// [`NotRun`](crate::steps::NotRun): mdBook is not there, and cannot be built.
pub(crate) fn make() -> Result<()> {
    let pages = source()?;
    run(Command::new(mdbook()?).arg("build").current_dir(root()))?;
    check(&root().join(SITE), &pages)
}

/// Writes what mdBook makes the site from; returns its pages.
///
/// # Errors
/// A page is not in the table of contents, or one there is not in the tree.
pub(crate) fn source() -> Result<BTreeSet<PathBuf>> {
    let (root, source) = (root(), root().join(SOURCE));
    let _ = fs::remove_dir_all(&source);
    let repository = packages()?.into_iter().find_map(|package| package.repository);
    let repository = repository.context("no package names its repository")?;
    let summary = fs::read_to_string(root.join(SUMMARY)).context(SUMMARY)?;
    let pages: BTreeSet<PathBuf> = links(&summary).map(|link| leads_to(SUMMARY, link)).collect();
    let write = |name: &Path, text: &str| -> Result<()> {
        let file = source.join(name);
        fs::create_dir_all(file.parent().context("a page lies in a folder")?)?;
        fs::write(&file, text).with_context(|| file.display().to_string())
    };
    write(Path::new("SUMMARY.md"), &changed(&summary, |link| leads_to(SUMMARY, link)))?;
    for page in &pages {
        let name = page.to_str().context("a page's name is UTF-8")?;
        let text = fs::read_to_string(root.join(page)).with_context(|| name.to_owned())?;
        let text = changed(&text, |link| {
            let path = link.split('#').next().unwrap_or_default();
            let target = leads_to(name, path);
            let is_here = pages.contains(&target) || target.starts_with("docs") && !ends(&target);
            match path.is_empty() || is_here {
                true => PathBuf::from(link),
                false => PathBuf::from(format!("{repository}/blob/HEAD/{}", target.display())),
            }
        });
        write(page, &text)?;
    }
    for entry in fs::read_dir(root.join("docs"))? {
        let path = entry?.path();
        let name = path.strip_prefix(&root)?;
        if ends(name) {
            ensure!(
                name == Path::new(SUMMARY) || pages.contains(name),
                "{name:?} is not in {SUMMARY}"
            );
        } else if path.is_file() {
            fs::copy(&path, source.join(name))?;
        }
    }
    Ok(pages)
}

/// The program.
///
/// # Errors
/// [`NotRun`](crate::steps::NotRun): it is not there, and cannot be built.
fn mdbook() -> Result<PathBuf> {
    tool("mdbook", MDBOOK, &["--no-default-features"])
}

/// Whether a file is a page.
fn ends(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// The file of the tree that a link on `page` leads to.
fn leads_to(page: &str, link: &str) -> PathBuf {
    let mut path = Path::new(page).parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => _ = path.pop(),
            part => path.push(part),
        }
    }
    path
}

/// A page with other targets of its links.
fn changed(text: &str, to: impl Fn(&str) -> PathBuf) -> String {
    let mut out = String::with_capacity(text.len());
    for (is_prose, line) in lines(text) {
        let mut rest = line;
        // Links come in their order.
        for link in links(line).filter(|_| is_prose) {
            let Some((before, after)) = rest.split_once(&format!("]({link})")) else { continue };
            let _ = write!(out, "{before}]({})", to(link).display());
            rest = after;
        }
        out.push_str(rest);
        out.push('\n');
    }
    out
}

/// Checks the site: the table of contents has every page, and each link and each picture leads to a
/// file, and to a place in it.
fn check(site: &Path, pages: &BTreeSet<PathBuf>) -> Result<()> {
    let mut files = Vec::new();
    let mut open = vec![site.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            match path.is_dir() {
                true => open.push(path),
                false => {
                    files.extend(path.extension().is_some_and(|e| e == "html").then_some(path))
                }
            }
        }
    }
    let (mut broken, mut count) = (Vec::new(), 0);
    for file in &files {
        let text = fs::read_to_string(file)?;
        for link in attributes(&text) {
            let (path, place) = link.split_once('#').unwrap_or((link, ""));
            let folder = file.parent().context("a file lies in a folder")?;
            let target = if path.is_empty() { file.clone() } else { folder.join(path) };
            count += 1;
            if !target.exists() || !place.is_empty() && !has_place(&target, place)? {
                broken.push(format!("{}: {link}", file.display()));
            }
        }
    }
    let contents = fs::read_to_string(site.join("toc.html")).context("the table of contents")?;
    let listed: BTreeSet<&str> = attributes(&contents).collect();
    for page in pages {
        let html = match page == Path::new("README.md") {
            true => PathBuf::from("index.html"),
            false => page.with_extension("html"),
        };
        if !listed.contains(html.to_str().context("a page's name is UTF-8")?) {
            broken.push(format!("the table of contents has no {}", html.display()));
        }
    }
    if !broken.is_empty() {
        bail!("the site's links that lead nowhere:\n{}", broken.join("\n"));
    }
    println!("{} pages, {count} links: {}", pages.len(), site.join("index.html").display());
    Ok(())
}

/// The targets of a page's links and pictures, but those of the web.
fn attributes(html: &str) -> impl Iterator<Item = &str> {
    let all = ["href=\"", "src=\""].into_iter().flat_map(|name| html.split(name).skip(1));
    let targets = all.filter_map(|rest| rest.split_once('"').map(|(target, _)| target));
    targets.filter(|target| !target.is_empty() && !target.contains(':'))
}

fn has_place(file: &Path, place: &str) -> Result<bool> {
    Ok(fs::read_to_string(file)?.contains(&format!("id=\"{place}\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_resolved_from_its_page() {
        assert_eq!(leads_to("docs/a.md", "../README.md"), Path::new("README.md"));
        assert_eq!(leads_to("docs/a.md", "b.md"), Path::new("docs/b.md"));
        assert_eq!(leads_to("README.md", "docs/b.md"), Path::new("docs/b.md"));
    }

    #[test]
    fn only_links_in_prose_change() {
        let text = "[a](x) [b](x)\n```\n[c](x)\n```\n[d](https://e.org) [e](x)\n";
        let with = "[a](y) [b](y)\n```\n[c](x)\n```\n[d](https://e.org) [e](y)\n";
        assert_eq!(changed(text, |_| PathBuf::from("y")), with);
    }
}
