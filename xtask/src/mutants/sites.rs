//! Where the product orders its memory accesses: every fence, and every `Ordering` that is not
//! `Relaxed`; and steps that must not be swapped, as `mutant!` names them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use crate::workspace::root;

/// An access with an ordering.
pub(crate) struct Site {
    /// The same as long as the function is: `sync/src/qsbr.rs Qsbr::scan load`, with a number if
    /// the function has several.
    pub(crate) name: String,
    /// As `Location::caller` prints it to a model.
    pub(crate) place: String,
    /// What can be taken away, as `RINGFENCE_MUTANT` names it.
    pub(crate) mutants: Vec<&'static str>,
    /// Why the ordering is the right one, where a comment says so.
    pub(crate) argument: Option<String>,
}

/// What opens an argument, in a comment at the access, at its function, or at the top of its file.
const ARGUMENT: &str = "Ordering: ";

/// All in the product's files.
pub(crate) fn all() -> Result<Vec<Site>> {
    let folder = root().join("crates");
    let mut sites = Vec::new();
    let mut crates = entries(&folder)?;
    crates.retain(|path| path.join("src").is_dir());
    for one in crates {
        below(&one.join("src"), &BTreeSet::new(), &mut sites)?;
    }
    Ok(sites)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let read = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = read.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    // A file before the folder of its modules: it says which of those are for tests.
    paths.sort_by_key(|path| (path.is_dir(), path.clone()));
    Ok(paths)
}

/// Reads a folder's files but for the modules in `tests`.
fn below(folder: &Path, tests: &BTreeSet<String>, sites: &mut Vec<Site>) -> Result<()> {
    let (mut here, mut inside) = (tests.clone(), BTreeMap::new());
    let files = entries(folder)?;
    let stem = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut found = Vec::new();
    for file in files.iter().filter(|path| path.extension().is_some_and(|is| is == "rs")) {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let place = file.strip_prefix(root())?.display().to_string();
        let (of, tests) = read(&place, &text).with_context(|| place.clone())?;
        if ["lib", "main", "mod"].contains(&&*stem(file)) {
            here.extend(tests);
        } else {
            inside.insert(stem(file), tests);
        }
        found.push((stem(file), of));
    }
    found.retain(|(name, _)| !here.contains(name));
    sites.extend(found.into_iter().flat_map(|(_, of)| of));
    for child in files.iter().filter(|path| path.is_dir() && !here.contains(&stem(path))) {
        below(child, inside.get(&stem(child)).unwrap_or(&BTreeSet::new()), sites)?;
    }
    Ok(())
}

/// The sites of a file, and the modules that it has for tests.
fn read(place: &str, text: &str) -> Result<(Vec<Site>, BTreeSet<String>)> {
    let tokens: TokenStream = text.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
    let lines: Vec<&str> = text.lines().collect();
    let short = place.strip_prefix("crates/").unwrap_or(place);
    let mut walk = Walk { place, short, lines: &lines, tests: BTreeSet::new(), found: Vec::new() };
    walk.stream(tokens, &Within::default());
    let Walk { tests, mut found, .. } = walk;
    let mut count = BTreeMap::<String, usize>::new();
    for site in &mut found {
        let n = count.entry(site.name.clone()).or_default();
        *n += 1;
        if *n > 1 {
            site.name = format!("{} {n}", site.name);
        }
    }
    Ok((found, tests))
}

/// What a token lies in.
#[derive(Clone, Default)]
struct Within {
    of: String,
    function: String,
    /// Where the function begins.
    line: usize,
}

impl Within {
    fn of(&self) -> String {
        if self.of.is_empty() { String::new() } else { format!("{}::", self.of) }
    }
}

struct Walk<'a> {
    place: &'a str,
    short: &'a str,
    lines: &'a [&'a str],
    tests: BTreeSet<String>,
    found: Vec<Site>,
}

impl Walk<'_> {
    fn stream(&mut self, tokens: TokenStream, within: &Within) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let (mut at, mut inside) = (0, within.clone());
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Punct(punct) if punct.as_char() == '#' => {
                    if let Some(TokenTree::Group(group)) = tokens.get(at + 1)
                        && is_for_tests(group)
                    {
                        at = self.skip(&tokens, at + 2);
                        continue;
                    }
                }
                TokenTree::Ident(word) if word == "fn" => {
                    if let Some(TokenTree::Ident(name)) = tokens.get(at + 1) {
                        inside.function = name.to_string();
                        inside.line = name.span().start().line;
                    }
                }
                TokenTree::Ident(word) if word == "mutant" => {
                    if let Some(TokenTree::Punct(bang)) = tokens.get(at + 1)
                        && bang.as_char() == '!'
                        && let Some(TokenTree::Group(name)) = tokens.get(at + 2)
                    {
                        self.steps(name, &inside);
                    }
                }
                TokenTree::Ident(word) if word == "impl" && within.function.is_empty() => {
                    inside.of = implemented(&tokens[at + 1..]).unwrap_or_default();
                }
                TokenTree::Group(group) => {
                    if group.delimiter() == Delimiter::Parenthesis
                        && let Some(TokenTree::Ident(called)) =
                            at.checked_sub(1).map(|n| &tokens[n])
                    {
                        self.call(called, group, &inside);
                    }
                    self.stream(group.stream(), &inside);
                    if group.delimiter() == Delimiter::Brace {
                        inside = within.clone();
                    }
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Passes over the item that is for tests; notes the name of a module.
    fn skip(&mut self, tokens: &[TokenTree], mut at: usize) -> usize {
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                TokenTree::Ident(word) if word == "mod" => {
                    self.tests.extend(tokens.get(at).map(ToString::to_string));
                }
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
                TokenTree::Punct(punct) if [';', ','].contains(&punct.as_char()) => break,
                _ => {}
            }
        }
        at
    }

    /// Steps that `mutant!("name")` swaps; several places of one name are one mutant.
    fn steps(&mut self, name: &Group, within: &Within) {
        let text = name.stream().to_string();
        let Some(text) = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) else {
            return;
        };
        if self.found.iter().any(|site| site.place == text) {
            return;
        }
        self.found.push(Site {
            name: format!("{} {}{}: {text}", self.short, within.of(), within.function),
            place: text.to_owned(),
            mutants: vec!["step"],
            argument: None,
        });
    }

    fn call(&mut self, called: &proc_macro2::Ident, arguments: &Group, within: &Within) {
        let orderings = orderings(arguments);
        let name = called.to_string();
        let mut mutants = Vec::new();
        if name.ends_with("fence") {
            match orderings.first() {
                None => return,
                Some(&"SeqCst") => mutants.extend(["fence", "sequence"]),
                Some(_) => mutants.push("fence"),
            }
        } else {
            let Some(first) = orderings.first() else { return };
            let loads = !["store", "set_state"].contains(&&*name);
            let stores = !["load", "state"].contains(&&*name);
            if loads && ["Acquire", "AcqRel", "SeqCst"].contains(first) {
                mutants.push("acquire");
            }
            if stores && ["Release", "AcqRel", "SeqCst"].contains(first) {
                mutants.push("release");
            }
            if orderings.get(1).is_some_and(|failure| *failure != "Relaxed") {
                mutants.push("failure");
            }
            if mutants.is_empty() {
                return;
            }
        }
        let start = called.span().start();
        self.found.push(Site {
            name: format!("{} {}{} {name}", self.short, within.of(), within.function),
            place: format!("{}:{}:{}", self.place, start.line, start.column + 1),
            mutants,
            argument: self.argument(start.line, within.line),
        });
    }

    /// The argument of an access: the nearest of a comment at its statement, one at its function,
    /// one at the top of the file.
    fn argument(&self, line: usize, function: usize) -> Option<String> {
        let above = |line: usize| (0..line.saturating_sub(1)).rev().map(|at| self.lines[at].trim());
        let comment = |line: &&str| line.starts_with("//");
        // The statement's first line follows one that ends another, or a comment.
        let ends =
            |line: &str| comment(&line) || line.ends_with([';', '{', '}']) || line.is_empty();
        let first = line - above(line).take_while(|line| !ends(line)).count();
        let own = self.lines[line - 1].split_once("// ").map(|(_, comment)| comment.to_owned());
        let block = |line: usize| {
            let mut block: Vec<&str> = above(line)
                .skip_while(|line| line.starts_with("#["))
                .take_while(comment)
                .map(|line| line.trim_start_matches('/').trim())
                .collect();
            block.reverse();
            block.join(" ")
        };
        let top: Vec<&str> =
            self.lines.iter().copied().take_while(|l| l.starts_with("//!")).collect();
        let top: Vec<&str> = top.iter().map(|line| line.trim_start_matches("//!").trim()).collect();
        let candidates = [own.unwrap_or_default(), block(first), block(function), top.join("\n")];
        candidates.iter().find_map(|text| {
            let (_, argument) = text.split_once(ARGUMENT)?;
            let paragraph = argument.split("\n\n").next()?;
            Some(paragraph.replace('\n', " "))
        })
    }
}

fn is_for_tests(attribute: &Group) -> bool {
    let text: String = attribute.stream().to_string().split_whitespace().collect();
    ["cfg(test", "cfg(all(test", "cfg(any(test", "cfg(loom", "test"].iter().any(|begin| {
        text.strip_prefix(begin).is_some_and(|rest| rest.is_empty() || !rest.starts_with('_'))
    })
}

/// The type that `impl ... {` is for.
fn implemented(tokens: &[TokenTree]) -> Option<String> {
    let (mut name, mut depth) = (None, 0);
    for token in tokens {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '<' => depth += 1,
            TokenTree::Punct(punct) if punct.as_char() == '>' => depth -= 1,
            TokenTree::Ident(word) if word == "for" => name = None,
            TokenTree::Ident(word) if word == "where" => break,
            TokenTree::Ident(word) if depth == 0 => name = Some(word.to_string()),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => break,
            _ => {}
        }
    }
    name
}

/// The orderings among the arguments of a call.
fn orderings(arguments: &Group) -> Vec<&'static str> {
    const NAMES: [&str; 5] = ["Acquire", "Release", "AcqRel", "SeqCst", "Relaxed"];
    let tokens: Vec<TokenTree> = arguments.stream().into_iter().collect();
    let one = |argument: &[TokenTree]| {
        // Names and what joins them: `x: Release` is no path.
        let path = argument.iter().enumerate().all(|(at, token)| match token {
            TokenTree::Ident(_) => at % 3 == 0,
            TokenTree::Punct(punct) => punct.as_char() == ':' && at % 3 != 0,
            _ => false,
        });
        let last = argument.last().filter(|_| path)?.to_string();
        NAMES.iter().copied().find(|name| *name == last)
    };
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(p) if p.as_char() == ',');
    tokens.split(is_comma).filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"//! A file.
//!
//! Ordering: argued for the
//! whole file.
//!
//! More.
#[cfg(test)]
mod tests;
impl<T: Fn(u8)> Trait<T> for Thing<T> {
    fn get(&self) -> u8 {
        fence(Ordering::SeqCst);
        // Ordering: here.
        let (a, b) =
            self.a.load(Ordering::Acquire);
        self.a.store(self.b.load(Relaxed), Ordering::Release); // Ordering: own
        assert!(self.word.compare_exchange(a, b, Ordering::AcqRel, Ordering::Acquire).is_ok());
    }
    /// Ordering: of the function.
    #[inline]
    fn other() { x.load(Acquire); y.load(Acquire) }
}
#[cfg(all(test, loom))]
mod inside { fn f() { x.load(Acquire) } }
fn free(what: Release) {
    ring.release(Release::All);
    x.fetch_add(1, SeqCst);
    if mutant!("late") || mutant!("late") {}
}
"#;

    #[test]
    fn every_ordering_is_found_with_its_argument() {
        let (sites, tests) = read("crates/a/src/b.rs", TEXT).unwrap();
        assert_eq!(tests, BTreeSet::from(["tests".into(), "inside".into()]));
        let seen: Vec<(&str, String, &str)> = sites
            .iter()
            .map(|site| {
                let argument = site.argument.as_deref().unwrap_or_default();
                (&*site.name, site.mutants.join(" "), argument)
            })
            .collect();
        let file = "argued for the whole file.";
        let expected = [
            ("a/src/b.rs Thing::get fence", "fence sequence".into(), file),
            ("a/src/b.rs Thing::get load", "acquire".into(), "here."),
            ("a/src/b.rs Thing::get store", "release".into(), "own"),
            ("a/src/b.rs Thing::get compare_exchange", "acquire release failure".into(), file),
            ("a/src/b.rs Thing::other load", "acquire".into(), "of the function."),
            ("a/src/b.rs Thing::other load 2", "acquire".into(), "of the function."),
            ("a/src/b.rs free fetch_add", "acquire release".into(), file),
            ("a/src/b.rs free: late", "step".into(), ""),
        ];
        assert_eq!(seen, expected);
        assert_eq!(sites[1].place, "crates/a/src/b.rs:14:20");
    }
}
