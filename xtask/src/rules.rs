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
        assert!(parse("| L1 | title | test |\n").is_err());
    }
}
