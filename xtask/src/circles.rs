//! Modules that import each other.
//!
//! An import is resolved through re-exports to the file that defines the item. A file may use what
//! the `mod.rs` of a folder that it lies in defines: that is the folder's own vocabulary.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::Result;
use syn::{Item, visit::Visit};

use crate::modules::{Name, absolute, defined, flatten, is_for_tests, read};

/// What a file defines, and what it names of other files.
#[derive(Default)]
struct Module {
    defines: BTreeSet<String>,
    /// What its imports are called here, and where they come from.
    imports: BTreeMap<String, Name>,
    /// All that it names of its crate, except what it only re-exports.
    uses: Vec<Name>,
}

/// The files of a crate's product that import each other, by circle.
pub(crate) fn of(source: &Path) -> Result<Vec<Vec<String>>> {
    let mut modules = BTreeMap::new();
    read(source, &Name::new(), &mut modules)?;
    let modules: BTreeMap<Name, Module> =
        modules.into_iter().map(|(name, file)| (name.clone(), Module::of(&name, &file))).collect();
    let mut edges: BTreeMap<&Name, BTreeSet<&Name>> = BTreeMap::new();
    for (name, module) in &modules {
        let targets = module.uses.iter().filter_map(|path| resolve(&modules, path, 0));
        // A module that contains this one does not count.
        edges.insert(name, targets.filter(|target| !name.starts_with(target)).collect());
    }
    let reach: BTreeMap<&Name, BTreeSet<&Name>> =
        edges.keys().map(|name| (*name, reached(&edges, name))).collect();
    let mut circles: Vec<BTreeSet<&Name>> = Vec::new();
    for (name, reached) in &reach {
        let circle: BTreeSet<&Name> =
            reached.iter().copied().filter(|other| reach[*other].contains(name)).collect();
        if circle.len() > 1 && !circles.contains(&circle) {
            circles.push(circle);
        }
    }
    let shown = |name: &&Name| if name.is_empty() { "lib".to_owned() } else { name.join("::") };
    Ok(circles.iter().map(|circle| circle.iter().map(shown).collect()).collect())
}

/// All that can be reached from a module.
fn reached<'m>(edges: &BTreeMap<&'m Name, BTreeSet<&'m Name>>, from: &Name) -> BTreeSet<&'m Name> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(name) = open.pop() {
        for next in &edges[name] {
            if reached.insert(*next) {
                open.push(next);
            }
        }
    }
    reached
}

/// The module that defines what a path leads to.
fn resolve<'m>(
    modules: &'m BTreeMap<Name, Module>,
    path: &[String],
    depth: usize,
) -> Option<&'m Name> {
    let known = (0..=path.len()).rev().find_map(|len| modules.get_key_value(&path[..len].to_vec()));
    let (name, module) = known?;
    let Some(first) = path.get(name.len()) else { return Some(name) };
    match module.imports.get(first) {
        // A circle of re-exports leads nowhere.
        Some(from) if !module.defines.contains(first) && depth < 8 && from[..] != *path => {
            let rest = &path[name.len() + 1..];
            resolve(modules, &[from.as_slice(), rest].concat(), depth + 1)
        }
        _ => Some(name),
    }
}

impl Module {
    fn of(name: &Name, file: &syn::File) -> Module {
        let mut module = Module::default();
        let children: BTreeSet<String> = file
            .items
            .iter()
            .filter_map(|item| match item {
                Item::Mod(module) if !is_for_tests(item) => Some(module.ident.to_string()),
                _ => None,
            })
            .collect();
        for item in file.items.iter().filter(|item| !is_for_tests(item)) {
            if let Item::Use(import) = item {
                let mut paths = Vec::new();
                flatten(&import.tree, &mut Vec::new(), &mut paths);
                let is_public = !matches!(import.vis, syn::Visibility::Inherited);
                for (path, called) in paths {
                    let from_child = path.first().is_some_and(|first| children.contains(first));
                    let path = match from_child {
                        true => Some([name.as_slice(), &path].concat()),
                        false => absolute(name, &path),
                    };
                    let Some(path) = path else { continue };
                    module.imports.insert(called, path.clone());
                    if !is_public {
                        module.uses.push(path);
                    }
                }
                continue;
            }
            module.defines.extend(defined(item));
            let mut paths = Paths { of: name, found: Vec::new() };
            paths.visit_item(item);
            module.uses.append(&mut paths.found);
        }
        module
    }
}

/// Paths in code that begin at the crate, or at a module above.
struct Paths<'m> {
    of: &'m Name,
    found: Vec<Name>,
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Name = path.segments.iter().map(|part| part.ident.to_string()).collect();
        if matches!(names[0].as_str(), "crate" | "super") {
            self.found.extend(absolute(self.of, &names));
        }
        syn::visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        of(folder.path()).unwrap()
    }

    #[test]
    fn two_files_that_import_each_other_are_a_circle_by_whatever_way() {
        let lib = ("lib.rs", "mod a; mod b; pub use a::A; pub use b::B;");
        let a = ("a.rs", "use crate::B; pub struct A(B);");
        let by_use = ("b.rs", "use super::a::A; pub struct B(Box<A>);");
        let by_path = ("b.rs", "pub struct B; fn f() -> Option<crate::a::A> { None }");
        let in_tests = ("b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::A; }");
        assert_eq!(circles(&[lib, a, by_use]), [["a", "b"]]);
        assert_eq!(circles(&[lib, a, by_path]), [["a", "b"]]);
        assert_eq!(circles(&[lib, a, in_tests]), Vec::<Vec<String>>::new());
    }

    #[test]
    fn what_a_folder_has_is_its_parts_own() {
        let lib = ("lib.rs", "mod a;");
        let a = ("a.rs", "mod b; use b::B; pub struct A(B);");
        let b = ("a/b.rs", "use super::A; pub struct B; impl B { fn f(a: A) {} }");
        assert_eq!(circles(&[lib, a, b]), Vec::<Vec<String>>::new());
    }
}
