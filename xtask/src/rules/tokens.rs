//! The token rule: only code that can guarantee an attestation calls its constructor.

use std::ffi::OsStr;
use std::path::{Component, Path};

use crate::source::Source;
use crate::violation::Violation;

/// A constructor, and the paths (prefixes) outside tests that may name it.
struct Attestation {
    name: &'static str,
    allowed: &'static [&'static str],
}

const ATTESTATIONS: &[Attestation] = &[
    // `Unmapped::attest_cleared`: every entry of the range is cleared.
    Attestation {
        name: "attest_cleared",
        allowed: &[
            "crates/types/src/obligation.rs",
            "crates/pgtable/src/",
            "crates/riscv-iommu/src/msi.rs",
            "crates/dma/src/space",
            // Tables on the other side of a virtqueue: cleared when the host answers. The
            // invalidation of the range waits for the answer.
            "crates/lab/src/guest/request_table.rs",
            "crates/pviommu/src/frontend/remote_table.rs",
            "crates/virtio-iommu-driver/src/map.rs",
            // Replaces a table when the meter leaves the table out: it has no entries.
            "crates/lab/src/stubs/",
            // The C caller attests it by calling `ringfence_iova_free`.
            "crates/c/src/iova.rs",
            // Counts the searches of an allocator without a table, so without entries.
            "crates/experiments/src/allocators.rs",
        ],
    },
];

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in sources {
        for attestation in ATTESTATIONS {
            if attestation.permits(&source.path) {
                continue;
            }
            found.extend(
                source
                    .tokens
                    .iter()
                    .filter(|token| token.is_ident(attestation.name) && !token.in_test)
                    .map(|token| {
                        let message = format!("`{}` is not this file's to call", attestation.name);
                        Violation::error(&source.path, token.line, message)
                    }),
            );
        }
    }
    found
}

impl Attestation {
    fn permits(&self, path: &Path) -> bool {
        // Benches and examples use one crate alone, as tests do, and play the role of the other
        // crates.
        let plays_others = |part: Component<'_>| {
            ["benches", "examples"]
                .map(OsStr::new)
                .contains(&part.as_os_str())
        };
        if path.components().any(plays_others) {
            return true;
        }
        path.to_str()
            .is_some_and(|path| self.allowed.iter().any(|allowed| path.starts_with(allowed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    #[test]
    fn attestations_elsewhere_are_found() {
        let call = "fn f() { Unmapped::attest_cleared(d, r); }";
        for (path, expected) in [
            ("crates/pgtable/src/table.rs", 0),
            ("crates/dma/src/space/flat.rs", 0),
            ("crates/dma/src/map.rs", 1),
            ("crates/iova/src/magazine.rs", 1),
            ("crates/lab/src/replay.rs", 1),
            ("crates/iova/benches/alloc.rs", 0),
        ] {
            assert_eq!(check(&[source(path, call)]).len(), expected, "{path}");
        }
        let in_test = format!("#[cfg(test)] mod tests {{ {call} }}");
        assert!(check(&[source("crates/iova/src/magazine.rs", &in_test)]).is_empty());
    }
}
