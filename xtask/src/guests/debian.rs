//! Debian's packages, fetched and unpacked without being installed.
//!
//! apt gets lists and a cache of its own: the machine's, with their age and permissions, do not
//! matter. It keeps the machine's sources, keys and proxy.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::workspace::output;

/// An apt with a state of its own.
pub(crate) struct Debian {
    folder: PathBuf,
    options: Vec<String>,
}

impl Debian {
    /// The machine's own release with fresh lists, below `folder`.
    ///
    /// # Errors
    /// This is no Debian, or its mirror cannot be reached.
    pub(crate) fn new(folder: &Path) -> Result<Debian> {
        let folder = folder.join("apt");
        let sources = folder.join("sources");
        fs::create_dir_all(&sources)?;
        own_sources(&sources)?;
        Debian::open(folder, &[])
    }

    /// Another release from the same mirror, below `folder`. None of its packages counts as
    /// installed, so that a package is fetched with all that it needs.
    ///
    /// That release must be signed with the newest keys of the machine's own release, which the
    /// machine's keys vouch for.
    ///
    /// # Errors
    /// The machine's sources name no mirror, or it cannot be reached, or has no such release that
    /// is signed.
    pub(crate) fn release(&self, release: &str, folder: &Path) -> Result<Debian> {
        let folder = folder.join("apt");
        let (sources, keys) = (folder.join("sources"), folder.join("keys"));
        fs::create_dir_all(&sources)?;
        for package in self.fetch(&["debian-archive-keyring".into()])? {
            extract(&package, &keys)?;
        }
        let keys = keys.join("usr/share/keyrings/debian-archive-keyring.gpg");
        let own = self.folder.join("sources");
        let own = entries(&own)?.iter().map(fs::read_to_string).collect::<Result<Vec<_>, _>>()?;
        let mirror = own.iter().find_map(|text| mirror(text));
        let mirror = mirror.context("/etc/apt names no mirror of Debian's main archive")?;
        let text = format!(
            "Types: deb\nURIs: {mirror}\nSuites: {release}\nComponents: main\nSigned-By: {}\n",
            keys.display()
        );
        fs::write(sources.join("0.sources"), text)?;
        // Nothing counts as installed, and this machine's preferences are for its own release.
        let nothing = ["Dir::State::status", "Dir::Etc::preferences", "Dir::Etc::preferencesparts"];
        let mut more: Vec<String> = nothing.map(|name| format!("{name}=/dev/null")).into();
        more.push(format!("APT::Default-Release={release}"));
        Debian::open(folder, &more)
    }

    /// With the sources that lie in `folder/sources`.
    fn open(folder: PathBuf, more: &[String]) -> Result<Debian> {
        for part in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(folder.join(part))?;
        }
        let option = |name: &str, value: &str| {
            ["-o".to_owned(), format!("{name}={}", folder.join(value).display())]
        };
        let mut options = Vec::new();
        options.extend(option("Dir::State::lists", "lists"));
        options.extend(option("Dir::Cache", ""));
        options.extend(option("Dir::Etc::sourceparts", "sources"));
        options.extend(["-o", "Dir::Etc::sourcelist=/dev/null"].map(String::from));
        // apt writes to folders that only this user may write to.
        options.extend(["-o", "APT::Sandbox::User=root"].map(String::from));
        options.extend(["-o", "Acquire::Languages=none", "-q"].map(String::from));
        // AppStream data is half of a release's lists, and not needed here.
        let looks = "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false";
        options.extend(["-o", looks].map(String::from));
        options.extend(more.iter().flat_map(|option| ["-o".to_owned(), option.clone()]));
        let debian = Debian { folder, options };
        output(debian.apt("apt-get").arg("update"))?;
        Ok(debian)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options).env("LC_ALL", "C").current_dir(self.folder.join("archives"));
        command
    }

    /// The newest cloud kernel of the series that the tests know, or else of all.
    pub(crate) fn newest_kernel(&self) -> Result<String> {
        let pattern = "^linux-image-[0-9].*-cloud-amd64$";
        let found = output(self.apt("apt-cache").args(["search", "--names-only", pattern]))?;
        let names = found.lines().filter_map(|line| line.split_once(" - ").map(|(name, _)| name));
        // A name with two numbers is a metapackage that depends on the newest of its series.
        let mut kernels: Vec<(bool, Vec<u64>, &str)> = names
            .map(|name| (name.starts_with("linux-image-6.12."), numbers(name), name))
            .filter(|(_, numbers, _)| numbers.len() > 3)
            .collect();
        kernels.sort();
        let (.., newest) = kernels.last().context("Debian's lists name no cloud kernel")?;
        Ok((*newest).to_owned())
    }

    /// A package, and those that it needs and this machine lacks.
    pub(crate) fn with_what_it_needs(&self, package: &str) -> Result<Vec<String>> {
        let plan = output(self.apt("apt-get").args([
            "install",
            "--simulate",
            "--no-install-recommends",
            "--reinstall",
            package,
        ]))?;
        let mut packages: Vec<String> = plan
            .lines()
            .filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next().map(String::from))
            .collect();
        // The machine may have its parts in another version.
        packages.extend(
            [package, "qemu-system-common", "qemu-system-data", "seabios"].map(String::from),
        );
        packages.sort();
        packages.dedup();
        Ok(packages)
    }

    /// Fetches packages; returns their paths.
    pub(crate) fn fetch(&self, packages: &[String]) -> Result<Vec<PathBuf>> {
        let archives = self.folder.join("archives");
        output(self.apt("apt-get").arg("download").args(packages))?;
        let mut files = Vec::new();
        for package in packages {
            let named = |file: &PathBuf| {
                let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
                name.strip_prefix(package.as_str()).is_some_and(|rest| rest.starts_with('_'))
            };
            let file = entries(&archives)?.into_iter().rfind(named);
            files.push(file.with_context(|| format!("{package} was not fetched"))?);
        }
        Ok(files)
    }

    /// Fetches a package's upstream source; returns its path.
    pub(crate) fn fetch_source(&self, package: &str) -> Result<PathBuf> {
        output(self.apt("apt-get").args(["source", "--download-only", package]))?;
        let is_source = |file: &PathBuf| {
            let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            name.starts_with(&format!("{package}_"))
                && name.contains(".orig.tar.")
                && !name.ends_with(".asc")
        };
        let found = entries(&self.folder.join("archives"))?.into_iter().rfind(is_source);
        found.with_context(|| format!("the source of {package} was not fetched"))
    }
}

/// Unpacks a package into a folder.
pub(crate) fn extract(package: &Path, into: &Path) -> Result<()> {
    output(Command::new("dpkg-deb").arg("--extract").arg(package).arg(into)).map(|_| ())
}

/// The machine's entries for Debian's own archives, with source packages: other archives need not
/// be reachable.
fn own_sources(into: &Path) -> Result<()> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    files.extend(entries(Path::new("/etc/apt/sources.list.d")).unwrap_or_default());
    let mut count = 0;
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        let deb822 = file.extension().is_some_and(|e| e == "sources");
        let kept = if deb822 { stanzas(&text) } else { lines(&text) };
        if !kept.is_empty() {
            let ending = if deb822 { "sources" } else { "list" };
            fs::write(into.join(format!("{count}.{ending}")), kept)?;
            count += 1;
        }
    }
    if count == 0 {
        bail!("/etc/apt names no archive of Debian's: guests are made from Debian's packages");
    }
    Ok(())
}

fn stanzas(text: &str) -> String {
    let debian = |stanza: &&str| stanza.lines().any(|l| l.starts_with("URIs:") && of_debian(l));
    let kept: Vec<String> = text
        .split("\n\n")
        .filter(debian)
        .map(|stanza| {
            let types = |line: &str| match line.starts_with("Types:") {
                true => "Types: deb deb-src".to_owned(),
                false => line.to_owned(),
            };
            stanza.lines().map(types).collect::<Vec<_>>().join("\n")
        })
        .collect();
    kept.join("\n\n")
}

fn lines(text: &str) -> String {
    let debian = |line: &&str| line.starts_with("deb ") && of_debian(line);
    text.lines().filter(debian).map(|line| format!("{line}\ndeb-src{}\n", &line[3..])).collect()
}

fn of_debian(line: &str) -> bool {
    line.contains("/debian")
}

/// The main archive's address in sources of either format.
fn mirror(sources: &str) -> Option<&str> {
    let named = sources.lines().filter(|l| l.starts_with("URIs:") || l.starts_with("deb "));
    let mut words = named.flat_map(str::split_whitespace);
    words.find(|word| word.contains(':') && of_debian(word) && !word.contains("security"))
}

fn numbers(text: &str) -> Vec<u64> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// A folder's entries, sorted.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("{}", folder.display()))?;
    let mut paths = entries.map(|e| Ok(e?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_debians_and_have_those_of_packages() {
        let text = "deb http://m/debian a main\ndeb http://other/apt a main\n# deb x/debian\n";
        assert_eq!(lines(text), "deb http://m/debian a main\ndeb-src http://m/debian a main\n");
        let text = "Types: deb\nURIs: http://m/debian\nSuites: a\n\nTypes: deb\nURIs: http://o/x\n";
        assert_eq!(stanzas(text), "Types: deb deb-src\nURIs: http://m/debian\nSuites: a");
    }

    #[test]
    fn a_mirror_is_that_of_the_main_archive() {
        let text = "Types: deb\nURIs: http://m/debian-security\n\nURIs: http://m/debian\n";
        assert_eq!(mirror(text), Some("http://m/debian"));
        let text = "deb http://m/debian-security a main\ndeb [arch=amd64] http://m/debian a main\n";
        assert_eq!(mirror(text), Some("http://m/debian"));
        assert_eq!(mirror("URIs: mirror+file:/etc/debian-security.list\n"), None);
    }

    #[test]
    fn versions_are_compared_by_number() {
        assert!(numbers("linux-image-6.12.117+deb12") > numbers("linux-image-6.12.99+deb12"));
    }
}
