//! The unsafe rule: only the files listed here contain unsafe code, each with its reason, and every
//! use argues that it is sound.

use proc_macro2::Delimiter;

use crate::source::Source;
use crate::violation::Violation;

/// Files that may contain unsafe code, and its purpose.
const ALLOWED: &[(&str, &str)] = &[
    ("crates/c/src/boundary.rs", "pointers of a C program"),
    (
        "crates/c/src/copy.rs",
        "memory that a front-end and a guest write",
    ),
    ("crates/c/src/dma.rs", "functions that C calls"),
    (
        "crates/c/src/iotlb.rs",
        "functions that C calls, and memory of the front-end",
    ),
    ("crates/c/src/iova.rs", "functions that C calls"),
    ("crates/c/src/lib.rs", "functions that C calls"),
    ("crates/c/src/memory.rs", "the C program's memory, as words"),
    ("crates/c/src/ports.rs", "the C program's callbacks"),
    ("crates/c/src/status.rs", "functions that C calls"),
    ("crates/c/src/table.rs", "functions that C calls"),
    (
        "crates/c/tests/support/mod.rs",
        "calls of the C interface, and its callbacks",
    ),
    ("crates/c/tests/table.rs", "callbacks of the C interface"),
    ("crates/iova/benches/support/clock.rs", "the cycle counter"),
    ("crates/lab/src/replay/timed/tsc.rs", "the cycle counter"),
    (
        "crates/live/src/confine/tests.rs",
        "system calls that the filter refuses",
    ),
    (
        "crates/live/src/event.rs",
        "asynchronous I/O, which signals eventfds without waiting",
    ),
    (
        "crates/guest-harness/src/idle_spinner.rs",
        "a thread with idle priority",
    ),
    (
        "crates/guest-harness/src/queue_pairs.rs",
        "the ioctl that sets a network device's queue pairs",
    ),
    (
        "crates/live/src/grants/control_region.rs",
        "memory of two processes, as words",
    ),
    (
        "crates/live/src/sandbox/copy.rs",
        "copies that may fault, and the handler",
    ),
    (
        "crates/live/src/sandbox/mapper.rs",
        "mapping pages that the supervisor grants",
    ),
    (
        "crates/live/src/sandbox/sandbox_memory.rs",
        "slices for vm-memory over copies",
    ),
    (
        "crates/live/src/grants/sys.rs",
        "seccomp and its notifications",
    ),
    (
        "crates/live/tests/isolate/simulator.rs",
        "processes that break out",
    ),
    (
        "crates/live/src/access/peer_groups.rs",
        "the groups of a socket's peer",
    ),
    ("crates/live/src/link/tap.rs", "a tap interface's ioctl"),
    (
        "crates/live/src/riommu/memory.rs",
        "tables in the guest's memory, as words",
    ),
    (
        "crates/live/src/memory/lock.rs",
        "keeping pages of a guest in memory",
    ),
    (
        "crates/virtio-iommu/tests/memory.rs",
        "an allocator that counts",
    ),
    ("crates/memory/src/line.rs", "cache-line write-back"),
    ("crates/memory/src/mmap_region.rs", "the arena's mapping"),
    ("crates/dma/benches/ring.rs", "the cycle counter"),
    ("crates/dma/benches/shadow.rs", "the cycle counter"),
    (
        "crates/pgtable/benches/support/timing.rs",
        "the cycle counter",
    ),
    (
        "crates/softiommu/src/prefetchw.rs",
        "a prefetch that takes a line over",
    ),
    (
        "crates/softiommu/src/zeroed.rs",
        "memory that is zero and not touched",
    ),
    (
        "crates/softiommu/tests/loom.rs",
        "cells that loom watches, shared",
    ),
    ("examples/bare-metal/src/boot.rs", "the entry"),
    (
        "examples/bare-metal/src/firmware.rs",
        "ACPI tables at their physical addresses",
    ),
    ("examples/bare-metal/src/io_port.rs", "I/O ports"),
    ("examples/bare-metal/src/main.rs", "the unit's registers"),
    ("examples/bare-metal/src/memory.rs", "cache-line write-back"),
    ("examples/bare-metal/src/mmio.rs", "memory-mapped registers"),
    (
        "examples/bare-metal/src/runtime.rs",
        "an allocator without std",
    ),
    (
        "examples/bare-metal/src/test_device.rs",
        "the device's registers",
    ),
    (
        "tests/qemu/src/ram.rs",
        "the RAM that QEMU and the judge share",
    ),
    ("tests/nostd/src/heap.rs", "an allocator without std"),
    ("tests/nostd/src/main.rs", "the entry point without std"),
];

pub(super) fn check(sources: &[Source]) -> Vec<Violation> {
    check_against(sources, ALLOWED)
}

fn check_against(sources: &[Source], allowed: &[(&str, &str)]) -> Vec<Violation> {
    let mut found = Vec::new();
    for source in sources {
        let permitted = allowed
            .iter()
            .any(|(path, _reason)| source.path.to_str() == Some(path));
        let lines: Vec<&str> = source.text.lines().collect();
        for (at, token) in source.tokens.iter().enumerate() {
            if !token.is_ident("unsafe") {
                continue;
            }
            if !permitted {
                found.push(Violation::error(
                    &source.path,
                    token.line,
                    "unsafe code in a file that is not on the list",
                ));
            }
            let obliged = source
                .tokens
                .get(at + 1)
                .is_some_and(|next| next.opens(Delimiter::Brace) || next.is_ident("impl"));
            if obliged && !is_argued(&lines, token.line) {
                found.push(Violation::error(
                    &source.path,
                    token.line,
                    "unsafe without a SAFETY comment above it",
                ));
            }
        }
    }
    found
}

/// Returns true if the statement around line `line` has a comment with `SAFETY:` directly above it
/// or inside it.
fn is_argued(lines: &[&str], line: usize) -> bool {
    for (distance, text) in lines[..line].iter().rev().enumerate() {
        let text = text.trim();
        if text.contains("// SAFETY:") {
            return true;
        }
        let is_comment = text.starts_with("//") || text.starts_with("#[");
        // The end of the previous statement: earlier comments belong to other statements.
        let ends_statement = text.is_empty() || text.ends_with([';', '{', '}']);
        if distance > 0 && ends_statement && !is_comment {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::source;

    fn count(path: &str, text: &str) -> usize {
        check_against(&[source(path, text)], &[("a.rs", "a test")]).len()
    }

    #[test]
    fn unsafe_elsewhere_is_found() {
        let argued = "fn f() {\n    // SAFETY: a reason.\n    unsafe { g() }\n}\n";
        assert_eq!(count("a.rs", argued), 0);
        assert_eq!(count("b.rs", argued), 1);
        assert_eq!(count("b.rs", "unsafe fn f() {}"), 1);
        assert_eq!(count("b.rs", "#![forbid(unsafe_code)]\n// unsafe\n"), 0);
        assert_eq!(count("b.rs", "#[cfg(test)] mod t { unsafe fn f() {} }"), 1);
    }

    #[test]
    fn missing_arguments_are_found() {
        for (text, expected) in [
            ("fn f() {\n    unsafe { g() }\n}", 1),
            ("// SAFETY: of another.\nfn f() {\n    unsafe { g() }\n}", 1),
            (
                "fn f() {\n    // SAFETY: a\n    // second line\n    let x =\n        unsafe { g() \
                };\n}",
                0,
            ),
            (
                "fn f() {\n    // SAFETY: a\n    h();\n    unsafe { g() }\n}",
                1,
            ),
            ("// SAFETY: a\nunsafe impl Send for A {}", 0),
            ("unsafe impl Send for A {}", 1),
            ("/// # Safety\n/// b\nunsafe fn f() {}", 0),
        ] {
            assert_eq!(count("a.rs", text), expected, "{text}");
        }
    }
}
