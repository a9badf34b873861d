//! The module rule: the modules of a crate form no cycle of more than two modules, so that they can
//! be read one after the other.
//!
//! The rule reads the paths that begin with `crate` or `super` and the re-exports of `lib.rs`. It
//! knows the top-level modules of a crate and ignores items of the crate's root.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::Delimiter;

use crate::source::{Kind, Source, Token};
use crate::violation::Violation;

/// Number of modules that may depend on each other in a circle.
const ALLOWED: usize = 2;

/// The modules of one crate.
#[derive(Debug, Default)]
struct Modules {
    names: BTreeSet<String>,
    /// The module of each name that the root re-exports.
    exports: BTreeMap<String, String>,
    /// The modules that each module uses.
    uses: BTreeMap<String, BTreeSet<String>>,
}

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    let mut crates: BTreeMap<&Path, Vec<(Vec<String>, &Source)>> = BTreeMap::new();
    for source in sources {
        if let Some((root, module)) = module_of(&source.path) {
            crates.entry(root).or_default().push((module, source));
        }
    }
    let mut found = Vec::new();
    for (root, files) in crates {
        let modules = Modules::read(&files);
        let cycle = modules.largest_cycle();
        let (size, list) = (cycle.len(), cycle.join(", "));
        if size > ALLOWED {
            let message = format!(
                "a cycle of {size} modules, at most {ALLOWED} allowed: {list}; move what they \
                share into a module below them"
            );
            found.push(Violation::error(&root.join("lib.rs"), 0, message));
        }
    }
    found
}

/// Returns the `src` directory and the module path of a file of a crate's library.
fn module_of(path: &Path) -> Option<(&Path, Vec<String>)> {
    let root = path.ancestors().find(|above| above.ends_with("src"))?;
    if !root.starts_with("crates") || root.components().count() != 3 {
        return None;
    }
    let inside = path.strip_prefix(root).ok()?.with_extension("");
    let mut module: Vec<String> = inside
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    if module.first().is_some_and(|first| first == "bin") {
        return None;
    }
    if module.last().is_some_and(|last| last == "mod") || module == ["lib"] || module == ["main"] {
        module.pop();
    }
    Some((root, module))
}

impl Modules {
    fn read(files: &[(Vec<String>, &Source)]) -> Self {
        let mut modules = Self::default();
        for (module, source) in files {
            modules.names.extend(module.first().cloned());
            if module.is_empty() {
                modules.read_exports(source);
            }
        }
        for (module, source) in files {
            let Some(own) = module.first() else { continue };
            for path in paths(&source.tokens, &["crate", "super"]) {
                let used = absolute(module, &path).and_then(|name| modules.defining(name));
                if let Some(used) = used.filter(|used| *used != own) {
                    let used = used.clone();
                    modules.uses.entry(own.clone()).or_default().insert(used);
                }
            }
        }
        modules
    }

    /// Reads the `use` items of the root.
    fn read_exports(&mut self, root: &Source) {
        for path in paths(&root.tokens, &["use"]) {
            let path: Vec<&String> = path[1..]
                .iter()
                .filter(|part| !["crate", "self"].contains(&part.as_str()))
                .collect();
            if let [module, .., name] = path[..] {
                self.exports.insert(name.clone(), module.clone());
            }
        }
    }

    /// Returns the module that is `name`, or that defines the root's item `name`.
    fn defining(&self, name: &str) -> Option<&String> {
        self.names
            .get(name)
            .or_else(|| self.names.get(self.exports.get(name)?))
    }

    /// Returns the modules of the largest set in which each module reaches every other one.
    fn largest_cycle(&self) -> Vec<&str> {
        let reached: BTreeMap<&String, BTreeSet<&String>> = self
            .names
            .iter()
            .map(|name| (name, self.reached(name)))
            .collect();
        let circle = |name: &String| -> Vec<&str> {
            let back = |other: &&&String| reached[**other].contains(name);
            reached[name]
                .iter()
                .filter(back)
                .map(|other| other.as_str())
                .collect()
        };
        let circles = self.names.iter().map(circle);
        circles.max_by_key(Vec::len).unwrap_or_default()
    }

    /// Returns the modules that `from` uses, directly or through others.
    fn reached<'a>(&'a self, from: &'a String) -> BTreeSet<&'a String> {
        let mut reached = BTreeSet::new();
        let mut waiting = vec![from];
        while let Some(name) = waiting.pop() {
            for used in self.uses.get(name).into_iter().flatten() {
                if reached.insert(used) {
                    waiting.push(used);
                }
            }
        }
        reached
    }
}

/// Returns the first name after the crate's root in a path that `module` uses. `None` if the path
/// ends at the root or below `module`'s own top-level module.
fn absolute<'a>(module: &'a [String], path: &'a [String]) -> Option<&'a str> {
    if path.first()? == "crate" {
        return path.get(1).map(String::as_str);
    }
    let up = path.iter().take_while(|part| *part == "super").count();
    match module.len().checked_sub(up)? {
        0 => path.get(up).map(String::as_str),
        _ => module.first().map(String::as_str),
    }
}

/// Returns the paths outside tests that begin with one of `starts`, groups expanded.
fn paths(tokens: &[Token], starts: &[&str]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        let begins = starts.iter().any(|start| token.is_ident(start));
        let inside = index > 0 && tokens[index - 1].is_punct(':');
        if begins && !inside && !token.in_test {
            expand(tokens, index, &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Appends the paths of the `use` tree at `index` to `found`, each after `prefix`. Returns the
/// index after the tree.
fn expand(
    tokens: &[Token],
    mut index: usize,
    prefix: &mut Vec<String>,
    found: &mut Vec<Vec<String>>,
) -> usize {
    let depth = prefix.len();
    loop {
        match tokens.get(index).map(|token| &token.kind) {
            Some(Kind::Ident(name)) if name == "as" => {
                // The root knows the item by its new name.
                if let Some(Kind::Ident(name)) = tokens.get(index + 1).map(|token| &token.kind) {
                    prefix.pop();
                    prefix.push(name.clone());
                }
                index += 2;
                break;
            }
            Some(Kind::Ident(name)) => {
                let is_use = prefix.is_empty() && name == "use";
                prefix.push(name.clone());
                index += 1;
                let colons = |at: usize| tokens.get(at).is_some_and(|token| token.is_punct(':'));
                if colons(index) && colons(index + 1) {
                    index += 2;
                } else if !is_use && !tokens.get(index).is_some_and(|token| token.is_ident("as")) {
                    break;
                }
            }
            Some(Kind::Open(Delimiter::Brace)) if depth < prefix.len() => {
                index += 1;
                loop {
                    match tokens.get(index).map(|token| &token.kind) {
                        None => break,
                        Some(Kind::Close(_)) => {
                            index += 1;
                            break;
                        }
                        Some(Kind::Punct(',')) => index += 1,
                        Some(_) => index = expand(tokens, index, prefix, found).max(index + 1),
                    }
                }
                prefix.truncate(depth);
                return index;
            }
            _ => break,
        }
    }
    found.push(prefix.clone());
    prefix.truncate(depth);
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::{shown, source};

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<Source> = files
            .iter()
            .map(|(path, text)| source(&format!("crates/a/src/{path}"), text))
            .collect();
        shown(&check(&sources))
    }

    const ROOT: (&str, &str) = (
        "lib.rs",
        "mod a; mod b; mod c; pub use a::A; pub use {b::{B, x::Old as New}, c::C};",
    );

    #[test]
    fn two_modules_may_use_each_other() {
        for uses in [
            ["use crate::B;", "use crate::a::A;", ""],
            ["use crate::{B, C};", "use crate::c::C;", "fn f() {}"],
            // Paths inside a module, in tests and in comments are no uses of another module.
            [
                "use crate::B;",
                "use crate::C;",
                "#[cfg(test)] mod t { use crate::A; }",
            ],
            [
                "use crate::B;",
                "use crate::C;",
                "// crate::a::A\nuse self::a::A;",
            ],
            [
                "use crate::B;",
                "use crate::C;",
                "pub(crate) fn f(a: c::a::A) {}",
            ],
        ] {
            let [a, b, c] = uses;
            let files = [ROOT, ("a.rs", a), ("b/mod.rs", b), ("c.rs", c)];
            assert_eq!(found(&files), [""; 0], "{uses:?}");
        }
    }

    #[test]
    fn three_modules_may_not() {
        for c in [
            "use crate::a::A;",
            "use crate::A;",
            "use super::A;",
            "pub use super::a::{self, A};",
            "use crate::{C, a::{B, C}};",
            "fn f(x: &crate::a::A) {}",
            "fn f() { crate::A::new() }",
        ] {
            let files = [
                ROOT,
                ("a.rs", "use crate::New;"),
                ("b/mod.rs", "mod x; use x::Old;"),
                ("b/x.rs", "use super::super::C; use super::Y;"),
                ("c.rs", c),
            ];
            let found = found(&files);
            assert!(
                found.len() == 1 && found[0].contains("3 modules") && found[0].contains("a, b, c"),
                "{c}: {found:?}"
            );
        }
    }

    #[test]
    fn only_libraries_have_modules() {
        for (path, module) in [
            ("crates/a/src/lib.rs", Some("")),
            ("crates/a/src/b.rs", Some("b")),
            ("crates/a/src/b/mod.rs", Some("b")),
            ("crates/a/src/b/c.rs", Some("b/c")),
            ("crates/a/src/bin/tool.rs", None),
            ("crates/a/tests/b.rs", None),
            ("xtask/src/b.rs", None),
        ] {
            let found = module_of(Path::new(path)).map(|(_, module)| module.join("/"));
            assert_eq!(found.as_deref(), module, "{path}");
        }
    }
}
