//! `cargo xtask mutants`: each ordering of the product is taken away, one at a time, and a model must
//! fail.
//!
//! The models run under loom, over atomics of which one access can be weakened
//! (`crates/sync/src/model.rs`). So one build serves all mutants, and nothing in the product names
//! them. What survives needs an argument in a comment at its place, which begins with `Ordering: `.

mod models;
mod sites;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Result, bail};

use self::{
    models::{Failure, Model},
    sites::Site,
};
use crate::{suite::side_by_side, workspace::root};

/// Where it is.
const TABLE: &str = "docs/mutants.txt";

/// One access with one thing taken away.
struct Mutant<'s> {
    site: &'s Site,
    taken: &'static str,
}

/// What became of a mutant: the model that fails, and how.
type Found<'m> = Option<(&'m Model, Failure)>;

/// What to do with the table in the tree.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Table {
    /// Each mutant runs on the model that it names, and those that are argued do not run.
    Follow,
    /// Every mutant runs on all models that reach its place, until one fails; the result is compared.
    Compare,
    /// The same, but the result is written.
    Write,
}

/// Runs all models, and then each mutant on models that reach its place, those with the fewest
/// executions first. `only`: places whose name contains this; their part of the table is printed.
///
/// # Errors
/// A model fails, a mutant survives without an argument, or the table differs.
pub(crate) fn run(only: Option<&str>, table: Table) -> Result<()> {
    let sites = sites::all()?;
    let file = root().join(TABLE);
    let before = fs::read_to_string(&file).unwrap_or_default();
    let known = if table == Table::Follow { known(&before) } else { BTreeMap::new() };
    let models = models::explore()?;
    let mutants: Vec<Mutant<'_>> = sites
        .iter()
        .filter(|site| only.is_none_or(|only| site.name.contains(only)))
        .flat_map(|site| site.mutants.iter().map(move |taken| Mutant { site, taken }))
        .collect();
    println!("{} models pass; {} mutants", models.len(), mutants.len());
    let found = Mutex::new(BTreeMap::new());
    let (done, numbers) = (AtomicUsize::new(0), (0..mutants.len()).collect::<Vec<_>>());
    side_by_side(&numbers, |&number| {
        let mutant = &mutants[number];
        let failure = look(mutant, &models, &known)?;
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(50) {
            println!("{done} of {}", mutants.len());
        }
        found.lock().expect("no thread panics").insert(number, failure);
        Ok(())
    })?;
    let found = found.into_inner().expect("no thread panics");
    let (mut now, mut wrong) = (String::from(HEAD), Vec::new());
    for (mutant, failure) in mutants.iter().zip(found.values()) {
        now.push_str(&line(mutant, failure.as_ref()));
        if failure.is_none() && mutant.site.argument.is_none() {
            let Site { name, place, .. } = mutant.site;
            let reached = models.iter().filter(|model| model.places.contains(place)).count();
            wrong.push(format!(
                "{name} without {}: {place} ({reached} models reach it)",
                mutant.taken
            ));
        }
    }
    if only.is_some() || !wrong.is_empty() {
        print!("{now}");
    }
    if !wrong.is_empty() {
        bail!(
            "{} mutants survive, and no `Ordering: ` at their place says why that is right:\n{}",
            wrong.len(),
            wrong.join("\n")
        );
    }
    match table {
        _ if only.is_some() => {}
        Table::Write => fs::write(&file, now)?,
        _ if now == before => {}
        _ => bail!("{TABLE} is not what came out: `cargo xtask mutants --update` writes it"),
    }
    Ok(())
}

/// The first model that fails with the mutant.
fn look<'m>(
    mutant: &Mutant<'_>,
    models: &'m [Model],
    known: &BTreeMap<String, String>,
) -> Result<Found<'m>> {
    let Site { name, place, .. } = mutant.site;
    let before = known.get(&format!("{name} | {}", mutant.taken));
    let mut reach: Vec<&Model> =
        models.iter().filter(|model| model.places.contains(place)).collect();
    // An argument holds until the table is written anew.
    if before.is_some_and(String::is_empty) && mutant.site.argument.is_some() {
        return Ok(None);
    }
    reach.sort_by_key(|model| (before != Some(&model.name), model.executions, &model.name));
    for model in reach {
        if let Some(failure) = model.fails(&format!("{place} {}", mutant.taken))? {
            return Ok(Some((model, failure)));
        }
    }
    Ok(None)
}

const HEAD: &str = "\
# Orderings of the product, what is taken away, the model that fails then, at which of its executions,
# with how many preemptions at most; or why none has to. `cargo xtask mutants --update` writes it.

";

fn line(mutant: &Mutant<'_>, found: Option<&(&Model, Failure)>) -> String {
    let mut line = format!("{} | {} | ", mutant.site.name, mutant.taken);
    match (found, &mutant.site.argument) {
        (Some((model, failure)), _) => {
            let Model { name, executions, preemptions, .. } = model;
            let Failure { execution, why } = failure;
            let execution = execution.map_or("one".to_owned(), |number| number.to_string());
            let _ = write!(line, "{name} | {execution} of {executions} | {preemptions} | {why}");
        }
        (None, Some(argument)) => {
            let _ = write!(line, "argued: {argument}");
        }
        (None, None) => line.push_str("SURVIVES"),
    }
    line.push('\n');
    line
}

/// The models in the table by place and what is taken away; empty: it is argued.
fn known(table: &str) -> BTreeMap<String, String> {
    let entry = |line: &str| {
        let mut parts = line.split(" | ");
        let key = format!("{} | {}", parts.next()?, parts.next()?);
        let model = parts.next()?;
        let argued = model.starts_with("argued: ");
        Some((key, if argued { String::new() } else { model.to_owned() }))
    };
    table.lines().filter(|line| !line.starts_with('#')).filter_map(entry).collect()
}
