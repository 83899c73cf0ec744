//! The modules of a crate, as written.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use syn::{Item, UseTree};

/// A module by its names from the crate's root on.
pub(crate) type Name = Vec<String>;

/// Reads a module's file and those of its children.
pub(crate) fn read(folder: &Path, name: &Name, into: &mut BTreeMap<Name, syn::File>) -> Result<()> {
    let inside = folder.join(name.join("/"));
    let files = match name.is_empty() {
        true => vec![folder.join("lib.rs"), folder.join("main.rs")],
        false => vec![inside.with_extension("rs"), inside.join("mod.rs")],
    };
    let Some(file) = files.into_iter().find(|file| file.exists()) else { return Ok(()) };
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let parsed = syn::parse_file(&text).with_context(|| file.display().to_string())?;
    for item in parsed.items.iter().filter(|item| !is_for_tests(item)) {
        if let Item::Mod(module) = item
            && module.content.is_none()
        {
            let child = [name.as_slice(), &[module.ident.to_string()]].concat();
            read(folder, &child, into)?;
        }
    }
    into.insert(name.clone(), parsed);
    Ok(())
}

/// A path from the crate's root on; `None` if it leads out of the crate.
pub(crate) fn absolute(of: &Name, path: &[String]) -> Option<Name> {
    let mut base = match path.first()?.as_str() {
        "crate" => Name::new(),
        "super" | "self" => of.clone(),
        _ => return None,
    };
    for part in path {
        match part.as_str() {
            "crate" | "self" => {}
            "super" => _ = base.pop()?,
            part => base.push(part.to_owned()),
        }
    }
    Some(base)
}

/// The paths of an import, and what each is called from then on.
pub(crate) fn flatten(tree: &UseTree, before: &mut Name, into: &mut Vec<(Name, String)>) {
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            flatten(&path.tree, before, into);
            before.pop();
        }
        UseTree::Name(name) if name.ident == "self" => {
            into.push((before.clone(), before.last().cloned().unwrap_or_default()));
        }
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            into.push(([before.as_slice(), std::slice::from_ref(&name)].concat(), name));
        }
        UseTree::Rename(name) => {
            let path = [before.as_slice(), &[name.ident.to_string()]].concat();
            into.push((path, name.rename.to_string()));
        }
        UseTree::Glob(_) => into.push((before.clone(), "*".to_owned())),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, before, into)),
    }
}

/// What an item defines.
pub(crate) fn defined(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Whether an item is there only for tests, or only for rustdoc to link to.
pub(crate) fn is_for_tests(item: &Item) -> bool {
    let attributes = match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => return false,
    };
    are_for_tests(attributes)
}

/// As [`is_for_tests`], of what these attributes belong to.
pub(crate) fn are_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let what = list.tokens.to_string();
        attribute.path().is_ident("cfg")
            && ["test", "all (test", "all(test", "any (test", "any(test", "doc", "loom"]
                .iter()
                .any(|begins| what.starts_with(begins))
    })
}
