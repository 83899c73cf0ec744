//! The account of the numbered rules: each has a test that names it, or a reason why not.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

/// What the table says of a rule.
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
    let root = crate::steps::root();
    let file = root.join("docs/rules.md");
    let text = fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
    let rules = parse(&text)?;
    let tests = find_tests(&root)?;

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
    for (id, places) in &tests {
        if !rules.contains_key(id) {
            gaps.push(format!("{id} (named at {}, but docs/rules.md has no such rule)", places[0]));
        }
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
}

/// Reads the rows `| L1 | title | bound |` of the table.
fn parse(text: &str) -> Result<BTreeMap<Id, (String, Bound)>> {
    let mut rules = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix("| ").and_then(|l| l.strip_suffix(" |")) else {
            continue;
        };
        let cells: Vec<&str> = row.split(" | ").map(str::trim).collect();
        let Some(id) = cells.first().and_then(|cell| Id::parse(cell)) else { continue };
        let at = format!("docs/rules.md:{}", number + 1);
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
                bail!("docs/rules.md lacks {letter}{number}");
            }
        }
    }
    Ok(rules)
}

/// Every comment `// rule L19` or `// rules L31, V15` in the sources, by rule.
fn find_tests(root: &Path) -> Result<BTreeMap<Id, Vec<String>>> {
    let mut tests: BTreeMap<Id, Vec<String>> = BTreeMap::new();
    for file in sources(&root.join("crates"))? {
        let text = fs::read_to_string(&file)?;
        let name = file.strip_prefix(root).unwrap_or(&file).display().to_string();
        for (number, line) in text.lines().enumerate() {
            for id in named(line) {
                tests.entry(id).or_default().push(format!("{name}:{}", number + 1));
            }
        }
    }
    Ok(tests)
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
        assert_eq!(named("// ruler L19"), []);
        assert_eq!(named("// the rule L19 says"), []);
        assert_eq!(named("let a = 1; // rule L19"), []);
    }

    #[test]
    fn a_table_with_a_missing_rule_is_refused() {
        assert!(parse("| L1 | title | test |\n").is_err());
    }
}
