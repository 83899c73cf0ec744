//! The account of the numbered rules: each has a test that names it, or a reason why not.

mod tests_found;

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result, bail};

/// What the table has for a rule.
#[derive(Debug, PartialEq, Eq)]
enum Bound {
    /// A test must name it.
    Test,
    /// It belongs to work that is not done yet.
    Later(String),
    /// It binds nothing here, for this reason.
    None(String),
}

/// Prints the account and fails on a gap.
pub(crate) fn account(all: bool) -> Result<()> {
    let root = crate::workspace::root();
    let file = root.join("docs/rules.md");
    let text = fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
    let rules = parse(&text)?;
    let found = tests_found::find(&root)?;
    let tests = &found.tests;

    let (mut tested, mut later, mut none, mut gaps) = (0, 0, 0, Vec::new());
    for (id, (title, bound)) in &rules {
        let places = tests.get(id);
        let state = match (bound, places) {
            (_, Some(places)) => {
                tested += 1;
                let more = match places.len() {
                    1 => String::new(),
                    n => format!(" (+{})", n - 1),
                };
                format!("test    {}{more}", places[0])
            }
            (Bound::None(reason), None) => {
                none += 1;
                format!("none    {reason}")
            }
            (Bound::Later(work), None) => {
                later += 1;
                format!("later   {work}")
            }
            (Bound::Test, None) => {
                gaps.push(id.to_string());
                "GAP     no test names it".to_owned()
            }
        };
        if all || state.starts_with("GAP") {
            println!("{:<4} {title}\n       {state}", id.to_string());
        }
    }
    for (id, places) in tests {
        if !rules.contains_key(id) {
            gaps.push(format!("{id} (named at {}, but docs/rules.md has no such rule)", places[0]));
        }
    }
    for idle in &found.idle {
        println!("idle    {idle}");
    }
    println!(
        "{} rules: {tested} with a test, {none} with a reason, {later} of work to come, {} gaps",
        rules.len(),
        gaps.len()
    );
    if !gaps.is_empty() {
        bail!("rules without a test or a reason: {}", gaps.join(", "));
    }
    Ok(())
}

/// The rules that have tests, and how many.
pub(crate) fn tested() -> Result<BTreeMap<String, usize>> {
    let tests = tests_found::find(&crate::workspace::root())?.tests;
    Ok(tests.into_iter().map(|(id, places)| (id.to_string(), places.len())).collect())
}

/// Fails if a published crate's pages, which `cargo doc` has made, name a rule without a link to it.
pub(crate) fn are_linked() -> Result<()> {
    let root = crate::workspace::root();
    let rules = parse(&fs::read_to_string(root.join("docs/rules.md"))?)?;
    let mut gaps = Vec::new();
    for package in crate::workspace::packages()?.iter().filter(|package| package.is_published()) {
        let mut folders = vec![root.join("target/doc").join(package.name.replace('-', "_"))];
        while let Some(folder) = folders.pop() {
            let entries = fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))?;
            for path in entries.map(|entry| entry.map(|entry| entry.path())) {
                let path = path?;
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "html") {
                    let html = fs::read_to_string(&path)?;
                    let unlinked = unlinked(&html).filter(|id| rules.contains_key(id));
                    gaps.extend(unlinked.map(|id| format!("{id} in {}", path.display())));
                }
            }
        }
    }
    if !gaps.is_empty() {
        bail!("rules that their items' pages do not link to: {}", gaps.join(", "));
    }
    Ok(())
}

/// What has the form of a rule's number in the text of `html`, and is not a link to that rule.
fn unlinked(html: &str) -> impl Iterator<Item = Id> {
    let (mut link, mut found) = ("", Vec::new());
    for part in html.split('<') {
        let (tag, text) = part.split_once('>').unwrap_or(("", part));
        match tag.split_whitespace().next() {
            Some("a") => link = tag,
            Some("/a") => link = "",
            _ => {}
        }
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        found.extend(
            words
                .filter_map(Id::parse)
                .filter(|id| !link.contains(&format!("/docs/rules.md#{}\"", id.place()))),
        );
    }
    found.into_iter()
}

/// A rule's letter and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Id(char, u32);

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.0, self.1)
    }
}

impl Id {
    fn parse(text: &str) -> Option<Id> {
        let letter = text.chars().next().filter(|c| matches!(c, 'L' | 'V' | 'D'))?;
        Some(Id(letter, text[1..].parse().ok()?))
    }

    /// Its place in docs/rules.md.
    fn place(self) -> String {
        self.to_string().to_lowercase()
    }
}

/// Reads the rows `| <a id="l1"></a>L1 | title | bound |` of the table.
fn parse(text: &str) -> Result<BTreeMap<Id, (String, Bound)>> {
    let mut rules = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix("| ").and_then(|l| l.strip_suffix(" |")) else {
            continue;
        };
        let cells: Vec<&str> = row.split(" | ").map(str::trim).collect();
        // The place that the documentation of an item links to: `<a id="l1"></a>L1`.
        let Some((place, name)) = cells.first().and_then(|cell| cell.split_once("</a>")) else {
            continue;
        };
        let Some(id) = Id::parse(name) else { continue };
        let at = format!("docs/rules.md:{}", number + 1);
        if place != format!("<a id=\"{}\">", id.place()) {
            bail!("{at}: the place of {id} is not <a id=\"{}\"></a>", id.place());
        }
        let [_, title, bound] = cells[..] else {
            bail!("{at}: a row has three cells: rule, title, bound");
        };
        let bound = match bound.split_once(": ") {
            _ if bound == "test" => Bound::Test,
            Some(("later", work)) => Bound::Later(work.to_owned()),
            Some(("none", reason)) => Bound::None(reason.to_owned()),
            _ => bail!("{at}: the third cell is `test`, `later: WORK` or `none: REASON`"),
        };
        if rules.insert(id, (title.to_owned(), bound)).is_some() {
            bail!("{at}: {id} stands twice");
        }
    }
    for (letter, count) in [('L', 66), ('V', 43), ('D', 30)] {
        for number in 1..=count {
            if !rules.contains_key(&Id(letter, number)) {
                bail!("docs/rules.md has no {letter}{number}");
            }
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_with_a_missing_rule_is_refused() {
        assert!(parse("| <a id=\"l1\"></a>L1 | title | test |\n").is_err());
    }

    #[test]
    fn a_rule_without_a_link_of_its_own_is_found() {
        let page = "<p>(rules <a href=\"https://x/docs/rules.md#l3\">L3</a>, L4 and \
                    <a href=\"https://x/docs/rules.md#l5\">L6</a>; VL7, L8_x, <b id=\"L9\">L</b>)";
        assert_eq!(unlinked(page).collect::<Vec<_>>(), [Id('L', 4), Id('L', 6)]);
    }
}
