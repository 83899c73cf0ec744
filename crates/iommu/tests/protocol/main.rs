//! The protocol of invalidation as a whole: every interleaving of its steps, in scenes that are small
//! enough to be explored whole. Each step is atomic here and seen at once by all threads; that the
//! product's memory orderings make it so is what the models beside the structures show.
#![cfg(not(loom))]

mod model;
mod reader;
mod rules;
mod scenes;
mod state;
mod writer;

use stateright::{Checker, HasDiscoveries, Model};

use self::{
    model::{BINDING, DEVICE, OVER, PAGES, READERS, graph},
    rules::{Property, Rule},
    scenes::{SCENES, Scene},
};

fn scene(name: &str) -> &'static Scene {
    SCENES.iter().find(|scene| scene.name == name).expect("the scene that a rule names")
}

/// The scene explored whole: all properties hold, and the checker has missed no state.
fn explore(scene: &Scene) {
    let checker = scene.clone().checker().threads(1).spawn_bfs().join();
    let graph = graph(scene);
    println!("{}: {} states, depth {}", scene.name, graph.states, checker.max_depth());
    for (property, path) in checker.discoveries() {
        assert_eq!(property, OVER, "{scene:?}: {path}");
    }
    assert!(checker.discovery(OVER).is_some(), "{}: nothing completes", scene.name);
    assert!(checker.is_done());
    assert_eq!(checker.unique_state_count(), graph.states, "{}: not explored whole", scene.name);
    assert!(graph.stuck.is_none(), "{scene:?}: no way to an end from {:?}", graph.stuck);
}

// rule D15
#[test]
fn no_scene_breaks_a_promise_and_every_unmap_ends() {
    SCENES.iter().for_each(explore);
}

// rule D15
#[test]
fn without_a_rule_a_scene_fails() {
    for &rule in Rule::ALL {
        let (name, property) = rule.found();
        let broken = scene(name).without(rule);
        let wanted = match property {
            Property::Readers => READERS,
            Property::Device => DEVICE,
            Property::Pages => PAGES,
            Property::Binding => BINDING,
            Property::Ends => {
                let stuck = graph(&broken).stuck;
                println!("{rule:?}, {name}: stuck in {stuck:?}");
                assert!(stuck.is_some(), "{name} ends without {rule:?}");
                continue;
            }
            Property::Nothing => {
                // Those with more readers are the longest, and none of the rules is of several readers.
                let small = SCENES.iter().filter(|scene| scene.readers.len() < 2 || scene.pages);
                small.for_each(|scene| explore(&scene.without(rule)));
                continue;
            }
        };
        let failures = HasDiscoveries::AnyOf([wanted].into());
        let checker = broken.checker().threads(1).finish_when(failures).spawn_bfs().join();
        let path = checker.discovery(wanted);
        let steps: Vec<_> = path.map(|path| path.into_actions()).unwrap_or_default();
        println!("{rule:?}, {name}, {} states: {steps:?}", checker.unique_state_count());
        assert!(!steps.is_empty(), "{name} holds without {rule:?}");
    }
}

/// The page that explains the protocol names every rule and every scene in code, and no other.
#[test]
fn the_page_names_every_rule_and_every_scene() {
    let page = include_str!("../../../../docs/invalidation.md");
    let first_cells = |heading: &str| -> Vec<String> {
        let (_, part) = page.split_once(heading).expect("the part of the page");
        let part = part.split("\n## ").next().expect("a part");
        let rows = part.lines().filter_map(|line| line.strip_prefix("| `"));
        rows.map(|row| row.split('`').next().expect("a name").to_owned()).collect()
    };
    let scenes: Vec<_> = SCENES.iter().map(|scene| scene.name.to_owned()).collect();
    assert_eq!(first_cells("## The scenes\n"), scenes);
    let mut named = first_cells("## What goes wrong without a rule\n");
    let mut rules: Vec<_> = Rule::ALL.iter().map(|rule| format!("{rule:?}")).collect();
    named.sort();
    rules.sort();
    assert_eq!(named, rules);
    // Each belongs to a step, too.
    for &rule in Rule::ALL {
        let text = page.split("## What goes wrong without a rule\n").next().expect("the text");
        assert!(text.contains(&format!("`{rule:?}`")), "no step says {rule:?}");
    }
}
