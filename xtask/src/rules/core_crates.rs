//! Core crates declare `#![no_std]` and `#![forbid(unsafe_code)]`.

use super::core_crate;
use crate::source::Source;
use crate::violation::Violation;

const DECLARATIONS: &[&str] = &["#![no_std]", "#![forbid(unsafe_code)]"];

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in sources {
        if core_crate(source).is_none() || !source.path.ends_with("src/lib.rs") {
            continue;
        }
        for declaration in DECLARATIONS {
            if !source.contains(declaration) {
                found.push(Violation::error(
                    &source.path,
                    0,
                    format!("a core crate declares {declaration}"),
                ));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    #[test]
    fn missing_declarations_are_found() {
        for (path, text, expected) in [
            (
                "crates/hw/src/lib.rs",
                "#![no_std]\n#![forbid(unsafe_code)]",
                0,
            ),
            ("crates/hw/src/lib.rs", "#![no_std]", 1),
            ("crates/hw/src/lib.rs", "// #![no_std]", 2),
            (
                "crates/hw/src/lib.rs",
                "#![cfg_attr(not(test), no_std)]\n#![forbid(unsafe_code)]",
                1,
            ),
            ("crates/hw/src/unit.rs", "", 0),
            ("crates/lab/src/lib.rs", "", 0),
        ] {
            assert_eq!(
                check(&[source(path, text)]).len(),
                expected,
                "{path}: {text}"
            );
        }
    }
}
