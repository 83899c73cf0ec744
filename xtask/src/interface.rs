//! `cargo xtask interface`: what each published crate offers, as a text in the tree.
//!
//! A change fails until the text is committed, so that it is seen. The text is the crate's own
//! items as they are written, without private ones; for what a macro makes it has the macro's call.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};
use syn::{Attribute, Fields, ImplItem, Item, TraitItem, Type, Visibility};

use crate::{
    modules::{Name, absolute, are_for_tests, defined, flatten, is_for_tests, read},
    workspace::{packages, root},
};

/// Where the texts are.
const FOLDER: &str = "docs/interface";

/// Fails if a crate's interface differs from the text in the tree, or with `update` writes it
/// there.
pub(crate) fn check(update: bool) -> Result<()> {
    let (folder, mut wrong) = (root().join(FOLDER), Vec::new());
    fs::create_dir_all(&folder)?;
    let mut stale: BTreeSet<PathBuf> =
        fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    for package in packages()?.iter().filter(|package| package.is_published()) {
        let name = package.name.strip_prefix("ringfence-").unwrap_or(&package.name);
        let (now, items) = text(&package.folder().join("src"))?;
        println!("{name:20} {items:4} items");
        let file = folder.join(format!("{name}.txt"));
        stale.remove(&file);
        if update {
            fs::write(&file, now)?;
        } else if fs::read_to_string(&file).unwrap_or_default() != now {
            wrong.push(name.to_owned());
        }
    }
    if update {
        stale.iter().try_for_each(fs::remove_file)?;
    } else if !wrong.is_empty() {
        bail!(
            "the interface of {} is not what {FOLDER} says: `cargo xtask interface --update` puts it there; commit \
             it, and say in CHANGELOG.md what a user has to do",
            wrong.join(", ")
        );
    }
    Ok(())
}

/// What a crate offers, and the number of its named items, methods included.
fn text(source: &Path) -> Result<(String, usize)> {
    let mut modules = BTreeMap::new();
    read(source, &Name::new(), &mut modules)?;
    let mut surface = Surface {
        modules: &modules,
        shown: BTreeMap::new(),
        types: BTreeMap::new(),
        calls: BTreeSet::new(),
    };
    surface.module(&Name::new(), &Name::new());
    let mut out = String::new();
    let Surface { mut shown, types, .. } = surface;
    for file in modules.values() {
        for item in file.items.iter().filter(|item| !is_for_tests(item)) {
            let Item::Impl(one) = item else { continue };
            let Some(place) = type_name(&one.self_ty).and_then(|name| types.get(&name)) else {
                continue;
            };
            let hidden = |path: &syn::Path| {
                let name =
                    path.segments.last().map(|part| part.ident.to_string()).unwrap_or_default();
                modules
                    .values()
                    .any(|file| file.items.iter().any(|item| defined(item).as_ref() == Some(&name)))
                    && !types.contains_key(&name)
            };
            if one.trait_.as_ref().is_some_and(|(_, path, _)| hidden(path)) {
                continue;
            }
            if let Some(item) = offered_impl(one) {
                shown.entry(place.clone()).or_default().push(item);
            }
        }
    }
    let mut count = 0;
    for (module, items) in shown {
        let name = if module.is_empty() { "the crate".to_owned() } else { module.join("::") };
        // A type's implementations follow it.
        let mut texts: Vec<(String, bool, String)> = items
            .into_iter()
            .map(|item| {
                count += named(&item);
                let (of, is_type) = match &item {
                    Item::Impl(one) => (type_name(&one.self_ty), false),
                    _ => (defined(&item), true),
                };
                let file = syn::File { shebang: None, attrs: Vec::new(), items: vec![item] };
                (of.unwrap_or_default(), !is_type, prettyplease::unparse(&file))
            })
            .collect();
        texts.sort();
        let _ = writeln!(out, "// {name}\n");
        texts.iter().for_each(|(.., text)| out.push_str(text));
        out.push('\n');
    }
    Ok((out.replace(" {}\n", ";\n"), count))
}

/// What can be reached from the root of a crate.
struct Surface<'m> {
    modules: &'m BTreeMap<Name, syn::File>,
    /// The items of each module that is offered.
    shown: BTreeMap<Name, Vec<Item>>,
    /// Where each type and each trait is offered.
    types: BTreeMap<String, Name>,
    /// Calls of macros that are shown.
    calls: BTreeSet<String>,
}

impl Surface<'_> {
    /// Notes what the module `name` offers, which is called `shown`.
    fn module(&mut self, name: &Name, shown: &Name) {
        let Some(file) = self.modules.get(name) else { return };
        self.items(&file.items, name, shown);
    }

    fn items(&mut self, items: &[Item], name: &Name, shown: &Name) {
        let children: BTreeSet<String> = items
            .iter()
            .filter_map(|item| match item {
                Item::Mod(module) => Some(module.ident.to_string()),
                _ => None,
            })
            .collect();
        for item in items.iter().filter(|item| !is_for_tests(item) && is_offered(item)) {
            match item {
                Item::Mod(module) => {
                    let inside = |of: &Name| [of.as_slice(), &[module.ident.to_string()]].concat();
                    match &module.content {
                        Some((_, items)) => self.items(items, &inside(name), &inside(shown)),
                        None => self.module(&inside(name), &inside(shown)),
                    }
                }
                Item::Use(import) => {
                    let mut paths = Vec::new();
                    flatten(&import.tree, &mut Name::new(), &mut paths);
                    for (path, called) in paths {
                        let own = path.first().is_some_and(|first| children.contains(first));
                        let own = if own {
                            Some([name.as_slice(), &path].concat())
                        } else {
                            absolute(name, &path)
                        };
                        self.import(own.unwrap_or(path), &called, shown, 0);
                    }
                }
                _ => self.item(item, shown),
            }
        }
    }

    /// Notes the item at `path`, which is called `called` in `shown`.
    fn import(&mut self, path: Name, called: &str, shown: &Name, depth: usize) {
        let modules = self.modules;
        if modules.contains_key(&path) && !path.is_empty() {
            return self.module(&path, &[shown.as_slice(), &[called.to_owned()]].concat());
        }
        let (module, last) = match path.split_last() {
            Some((last, module)) => (module.to_vec(), last.clone()),
            None => return,
        };
        let Some(file) = modules.get(&module).filter(|_| depth < 8) else {
            // Of another crate.
            let text = match path.last() {
                Some(last) if last != called => format!("pub use {} as {called};", path.join("::")),
                _ => format!("pub use {};", path.join("::")),
            };
            let import = syn::parse_str(&text).expect("it was read as an import");
            self.shown.entry(shown.clone()).or_default().push(import);
            return;
        };
        if let Some(item) = file
            .items
            .iter()
            .find(|item| !is_for_tests(item) && defined(item).as_ref() == Some(&last))
        {
            return self.item(item, shown);
        }
        for item in &file.items {
            match item {
                Item::Use(import) => {
                    let mut paths = Vec::new();
                    flatten(&import.tree, &mut Name::new(), &mut paths);
                    if let Some((from, name)) = paths.into_iter().find(|(_, name)| *name == last) {
                        let child = [module.as_slice(), &from].concat();
                        let own = absolute(&module, &from).unwrap_or(child);
                        return self.import(own, &name, shown, depth + 1);
                    }
                }
                // The call names what it makes.
                Item::Macro(call)
                    if call.ident.is_none() && call.mac.tokens.to_string().contains(&last) =>
                {
                    let is_new = !self.types.contains_key(&last);
                    self.types.insert(last, shown.clone());
                    if is_new && self.calls.insert(call.mac.tokens.to_string()) {
                        self.item(item, shown);
                    }
                    return;
                }
                _ => {}
            }
        }
    }

    fn item(&mut self, item: &Item, shown: &Name) {
        if let Some(name) = defined(item)
            && matches!(
                item,
                Item::Struct(_) | Item::Enum(_) | Item::Trait(_) | Item::Union(_) | Item::Type(_)
            )
        {
            self.types.insert(name, shown.clone());
        }
        let mut item = item.clone();
        bare(&mut item);
        self.shown.entry(shown.clone()).or_default().push(item);
    }
}

/// Whether an item may be used from outside of its module.
fn is_offered(item: &Item) -> bool {
    let public = |seen: &Visibility| matches!(seen, Visibility::Public(_));
    match item {
        Item::Const(item) => public(&item.vis),
        Item::Enum(item) => public(&item.vis),
        Item::Fn(item) => public(&item.vis),
        Item::Macro(item) => item.attrs.iter().any(|one| one.path().is_ident("macro_export")),
        Item::Mod(item) => public(&item.vis),
        Item::Static(item) => public(&item.vis),
        Item::Struct(item) => public(&item.vis),
        Item::Trait(item) => public(&item.vis),
        Item::Type(item) => public(&item.vis),
        Item::Use(item) => public(&item.vis),
        _ => false,
    }
}

/// Keeps only the attributes that matter to a user.
fn keep(attributes: &mut Vec<Attribute>) {
    attributes.retain(|one| {
        ["derive", "must_use", "non_exhaustive", "repr"]
            .iter()
            .any(|name| one.path().is_ident(name))
    });
}

/// Removes an item's private parts, its documentation and its bodies.
fn bare(item: &mut Item) {
    match item {
        Item::Const(item) => {
            keep(&mut item.attrs);
            *item.expr = nothing();
        }
        Item::Static(item) => {
            keep(&mut item.attrs);
            *item.expr = nothing();
        }
        Item::Enum(item) => {
            keep(&mut item.attrs);
            for variant in &mut item.variants {
                keep(&mut variant.attrs);
                fields(&mut variant.fields, false);
            }
        }
        Item::Fn(item) => {
            keep(&mut item.attrs);
            item.block.stmts.clear();
        }
        Item::Struct(item) => {
            keep(&mut item.attrs);
            fields(&mut item.fields, true);
        }
        Item::Trait(item) => {
            keep(&mut item.attrs);
            for part in &mut item.items {
                match part {
                    TraitItem::Fn(part) => {
                        keep(&mut part.attrs);
                        part.default.iter_mut().for_each(|block| block.stmts.clear());
                    }
                    TraitItem::Type(part) => keep(&mut part.attrs),
                    TraitItem::Const(part) => keep(&mut part.attrs),
                    _ => {}
                }
            }
        }
        Item::Type(item) => keep(&mut item.attrs),
        Item::Macro(item) => keep(&mut item.attrs),
        _ => {}
    }
}

fn nothing() -> syn::Expr {
    syn::parse_str("_").expect("an expression")
}

/// A variant's fields are all public. Of a struct, the private fields are removed; of a tuple,
/// their types.
fn fields(of: &mut Fields, of_struct: bool) {
    let hides = |seen: &Visibility| of_struct && !matches!(seen, Visibility::Public(_));
    match of {
        Fields::Named(named) => {
            let all = std::mem::take(&mut named.named);
            named.named = all.into_iter().filter(|field| !hides(&field.vis)).collect();
            named.named.iter_mut().for_each(|field| keep(&mut field.attrs));
        }
        Fields::Unnamed(unnamed) => {
            for field in &mut unnamed.unnamed {
                keep(&mut field.attrs);
                if hides(&field.vis) {
                    field.ty = syn::parse_str("_").expect("a type");
                }
            }
        }
        Fields::Unit => {}
    }
}

/// What an implementation offers; `None`: nothing.
fn offered_impl(of: &syn::ItemImpl) -> Option<Item> {
    let mut one = of.clone();
    keep(&mut one.attrs);
    if one.trait_.is_some() {
        // The trait declares its methods.
        one.items.retain(|part| matches!(part, ImplItem::Type(_)));
    } else {
        one.items.retain(|part| match part {
            ImplItem::Fn(part) => {
                matches!(part.vis, Visibility::Public(_)) && !are_for_tests(&part.attrs)
            }
            ImplItem::Const(part) => matches!(part.vis, Visibility::Public(_)),
            ImplItem::Type(part) => matches!(part.vis, Visibility::Public(_)),
            _ => false,
        });
        if one.items.is_empty() {
            return None;
        }
    }
    for part in &mut one.items {
        match part {
            ImplItem::Fn(part) => {
                keep(&mut part.attrs);
                part.block.stmts.clear();
            }
            ImplItem::Const(part) => {
                keep(&mut part.attrs);
                part.expr = nothing();
            }
            ImplItem::Type(part) => keep(&mut part.attrs),
            _ => {}
        }
    }
    Some(Item::Impl(one))
}

/// The name of the type that an implementation is for.
fn type_name(of: &Type) -> Option<String> {
    match of {
        Type::Path(path) => path.path.segments.last().map(|part| part.ident.to_string()),
        Type::Reference(one) => type_name(&one.elem),
        _ => None,
    }
}

/// How many names a shown item has: its own, and those of its methods and constants.
fn named(item: &Item) -> usize {
    match item {
        Item::Impl(one) if one.trait_.is_some() => 0,
        Item::Impl(one) => one.items.len(),
        Item::Trait(one) => 1 + one.items.len(),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_reached_is_shown_without_what_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("lib.rs", "mod a; pub mod b; pub use a::{A, help as aid}; pub use other::Thing;");
        write(
            "a.rs",
            "/// Words.\n#[derive(Debug)] pub struct A { pub x: u8, y: u8 } struct B; pub struct Unreached;\n\
             impl A { pub fn f(&self) -> u8 { self.y } fn g() {} } impl Clone for A { fn clone(&self) -> A { *self } }\n\
             impl B { pub fn h() {} } pub fn help() { B::h() }",
        );
        write(
            "b.rs",
            "pub const N: u8 = 7; pub enum E { One, Two(u8) } #[cfg(test)] pub fn t() {}",
        );
        let (shown, count) = text(folder.path()).unwrap();
        let expected = "// the crate\n\npub use other::Thing;\n#[derive(Debug)]\npub struct A {\n    pub x: u8,\n}\nimpl A {\n    \
                        pub fn f(&self) -> u8;\n}\nimpl Clone for A;\npub fn help();\n\n\
                        // b\n\npub enum E {\n    One,\n    Two(u8),\n}\npub const N: u8 = _;\n\n";
        assert_eq!(shown, expected);
        assert_eq!(count, 6);
    }
}
