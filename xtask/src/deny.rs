//! Licences, sources and bans of the dependencies.
//!
//! deny.toml is in the format of cargo-deny, which is run if it is installed. Compiling it takes
//! longer than all our tests, so that what must never slip (a licence, a registry, a banned crate)
//! is also checked here, from `cargo metadata`, on every machine.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::workspace::{Package, cargo, output, packages_and_dependencies, root};

#[derive(Deserialize)]
struct Config {
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Deserialize)]
struct Ban {
    #[serde(alias = "name")]
    #[serde(rename = "crate")]
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

/// Checks every dependency; fails on the first kind of trouble, naming all crates that have it.
pub(crate) fn check() -> Result<()> {
    let text = fs::read_to_string(root().join("deny.toml")).context("deny.toml")?;
    let config: Config = toml::from_str(&text).context("deny.toml")?;
    let packages = packages_and_dependencies()?;
    let mut wrong = Vec::new();
    for Package { name, version, license, source, .. } in &packages {
        match license {
            Some(license) if allowed(license, &config.licenses.allow) => {}
            other => wrong.push(format!("{name} {version}: licence {other:?} is not allowed")),
        }
        if let Some(source) = source {
            let registry = source.strip_prefix("registry+").unwrap_or(source);
            if !config.sources.allow_registry.iter().any(|allowed| allowed == registry) {
                wrong.push(format!("{name} {version}: source {source} is not allowed"));
            }
        }
        if config.bans.deny.iter().any(|ban| ban.name == *name) {
            wrong.push(format!("{name} {version} is banned"));
        }
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    println!("{} packages: licences, sources and bans in order", packages.len());

    if output(Command::new("cargo-deny").arg("--version")).is_ok() {
        cargo(&["deny", "check", "licenses", "bans", "sources"], &[])?;
    }
    Ok(())
}

/// Whether an SPDX expression can be satisfied by the allowed licences. `AND` binds stronger than
/// `OR`; brackets are honoured; the old form `MIT/Apache-2.0` means `OR`, and operators may be in lower
/// case, as SPDX 3 has them.
fn allowed(expression: &str, allow: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let upper = |word| match word {
        "or" => "OR",
        "and" => "AND",
        "with" => "WITH",
        other => other,
    };
    let words: Vec<&str> = spaced.split_whitespace().map(upper).collect();
    let mut at = 0;
    let holds = any(&words, &mut at, allow);
    holds && at == words.len()
}

fn any(words: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let mut holds = every(words, at, allow);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        holds |= every(words, at, allow);
    }
    holds
}

fn every(words: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let mut holds = one(words, at, allow);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        holds &= one(words, at, allow);
    }
    holds
}

fn one(words: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let holds = any(words, at, allow);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return holds && closed;
    }
    // `A WITH B` is one licence.
    if words.get(*at) == Some(&"WITH") && *at + 1 < words.len() {
        let whole = format!("{word} WITH {}", words[*at + 1]);
        *at += 2;
        return allow.contains(&whole);
    }
    allow.iter().any(|licence| licence == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_judged_as_spdx_says() {
        let allow = ["MIT".to_owned(), "Apache-2.0".to_owned(), "Unicode-3.0".to_owned()];
        assert!(allowed("MIT OR GPL-2.0", &allow));
        assert!(allowed("MIT/GPL-2.0", &allow));
        assert!(allowed("MIT or GPL-2.0", &allow));
        assert!(!allowed("MIT and GPL-2.0", &allow));
        assert!(allowed("(MIT OR GPL-2.0) AND Unicode-3.0", &allow));
        assert!(!allowed("MIT AND GPL-2.0", &allow));
        assert!(!allowed("GPL-2.0", &allow));
        assert!(!allowed("Apache-2.0 WITH LLVM-exception", &allow));
        assert!(!allowed("(MIT", &allow));
        assert!(!allowed("", &allow));
    }
}
