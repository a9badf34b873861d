//! Tests of the kernel module in user space. They cover its wire format (`kmod/tests/vectors.c`)
//! and its cache (`kmod/tests/cache.c`). They run its queue and operations against a host that
//! answers late, never, or with a refusal (`kmod/tests/frontend.c` and `host.c`). They also run its
//! event queue (`kmod/tests/events.c`). They load it without parameters and unload it
//! (`kmod/tests/load.c`). The ring IOMMU's driver has vectors too (`kmod/tests/riommu_vectors.c`).
//! Its slots, their queue and its bursts run against an IOMMU that checks each invalidation
//! (`kmod/tests/riommu_ring.c`, `riommu_free.c`, `riommu_burst.c`), its tables against one that
//! walks them (`riommu_tables.c`), its removal during an unmap (`riommu_remove.c`), and its fault
//! queue against one that stops it (`riommu_faults.c`). The pools of shadow buffers have programs,
//! too: their slots and operations (`kmod/tests/pool.c`), their devices and memory (`pool_bind.c`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds `kmod/tests/{name}.c`, and runs it with the additions of `build` and `run`.
fn built(name: &str, build: impl FnOnce(&mut Command), run: impl FnOnce(&mut Command)) -> Output {
    let kmod = repository().join("kmod");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut compiler = Command::new("cc");
    compiler
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-fsanitize=undefined"])
        .arg("-fno-sanitize-recover")
        .arg("-I")
        .arg(&kmod);
    build(&mut compiler);
    let status = compiler
        .arg(kmod.join("tests").join(name).with_extension("c"))
        .arg("-o")
        .arg(&program)
        .status()
        .expect("a C compiler");
    assert!(status.success(), "it compiles without warnings");
    let mut program = Command::new(&program);
    run(&mut program);
    program.output().unwrap()
}

fn checked_output(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn module_agrees_with_the_vectors() {
    let vectors = repository().join("crates/pviommu/vectors");
    let output = built(
        "vectors",
        |_| (),
        |program| {
            program.arg(&vectors);
        },
    );
    let text = checked_output(&output);
    // The vectors contain valid and invalid requests, configuration spaces and events.
    let words = text.split_whitespace();
    let counts: Vec<u32> = words.filter_map(|word| word.parse().ok()).collect();
    assert_eq!(counts.len(), 6, "{text}");
    for (count, least) in counts.iter().zip([110, 40, 10, 25, 7, 16]) {
        assert!(*count >= least, "{text}");
    }
}

#[test]
fn ring_driver_agrees_with_the_encodings() {
    let vectors = repository().join("crates/riommu-device/vectors/encodings.txt");
    let output = built(
        "riommu_vectors",
        |_| (),
        |program| {
            program.arg(&vectors);
        },
    );
    let text = checked_output(&output);
    let count = text
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok());
    assert!(count.is_some_and(|count: u32| count >= 50), "{text}");
}

/// Creates an empty file for each kernel header that the module includes; `kmod/tests/kernel.h` has
/// the needed definitions.
fn empty_headers() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("headers");
    let sources = fs::read_dir(repository().join("kmod")).unwrap();
    for source in sources.map(|entry| entry.unwrap().path()) {
        if source
            .extension()
            .is_none_or(|end| end != "c" && end != "h")
        {
            continue;
        }
        let text = fs::read_to_string(source).unwrap();
        for line in text.lines() {
            let name = line.strip_prefix("#include <linux/");
            // User space has this header, too.
            match name.and_then(|name| name.strip_suffix('>')) {
                Some("types.h") | None => {}
                Some(name) => {
                    fs::create_dir_all(dir.join("linux")).unwrap();
                    fs::write(dir.join("linux").join(name), "").unwrap();
                }
            }
        }
    }
    dir
}

/// Builds and runs a program with `kernel.h` and `host.c` around the module's files.
fn with_a_host(name: &str) {
    let tests = repository().join("kmod/tests");
    let vectors = repository().join("crates/pviommu/vectors");
    let output = built(
        name,
        |compiler| {
            compiler
                .args(["-std=gnu11", "-fsanitize=address"])
                .args(["-Wno-unused-parameter", "-Wno-unused-function"])
                .args(["-D__KERNEL__", "-D__EXPORTED_HEADERS__"])
                .args(
                    (name == "threads")
                        .then_some(["-DTEST_THREADS", "-pthread"])
                        .iter()
                        .flatten(),
                )
                .arg("-include")
                .arg(tests.join("kernel.h"))
                .arg("-I")
                .arg(empty_headers());
        },
        |program| {
            program.arg(&vectors);
        },
    );
    assert_eq!(checked_output(&output), "all as it should be\n");
}

#[test]
fn event_rate_limit_holds_for_any_host() {
    with_a_host("events");
}

#[test]
fn the_modules_requests_end_well_whatever_the_host_does() {
    with_a_host("frontend");
}

#[test]
fn the_modules_cache_keeps_its_limit_and_its_addresses() {
    with_a_host("cache");
}

/// The module pviommu-as-published has the paper's cache, whose defects give the device accesses.
#[test]
fn the_published_cache_is_another_module() {
    with_a_host("as_published");
}

/// A map and its unmap complete while another CPU holds the locks of all other shards.
#[test]
fn callers_do_not_wait_for_each_other() {
    with_a_host("shards");
}

/// Memory of single pages is consecutive for the device, and freed only after its unmap.
#[test]
fn coherent_memory_need_not_be_contiguous() {
    with_a_host("memory");
}

/// Threads map and unmap for one device while cycles end. Nothing is lost, and nothing is left.
#[test]
fn threads_leave_nothing_behind() {
    with_a_host("threads");
}

/// Without parameters an unmap reaches the host at once. The module leaves the error state of its
/// endpoints to the PCI core.
#[test]
fn the_module_loads_without_a_cache_and_unloads() {
    with_a_host("load");
}

/// Interruptions of a take or a put give no slot to two owners and lose none.
#[test]
fn free_slots_have_one_owner() {
    with_a_host("riommu_free");
}

/// Mode `burst`: no page of a buffer is freed before the invalidation of its slot, and references
/// are dropped once. Mode `burst-paper` does nothing in this module.
#[test]
fn bursts_hold_pages_until_their_invalidation() {
    with_a_host("riommu_burst");
}

/// The module riommu-as-published has the mode `burst-paper`, in which a page is freed before the
/// invalidation. No slot is reused before it.
#[test]
fn published_bursts_are_another_module() {
    with_a_host("riommu_as_published");
}

/// The ring driver clears a slot before its invalidation, waits, and only then uses it again.
#[test]
fn slots_are_used_again_after_their_invalidation() {
    with_a_host("riommu_ring");
}

/// An IOMMU that could not record a fault is started again, once in each pause, but not after the
/// driver has stopped it. The module refuses modes that it does not have.
#[test]
fn stopped_fault_queue_is_restarted() {
    with_a_host("riommu_faults");
}

/// A device reaches the slots of its own rings once its context entry is complete, and none after
/// its driver has unbound. A failed initialization leaves nothing.
#[test]
fn ring_tables_are_complete_before_they_are_reached() {
    with_a_host("riommu_tables");
}

/// The driver of a ring IOMMU is removed while an unmap in atomic context runs. Its endpoints are
/// freed after that unmap. Devices whose buffers have shadows do not skip syncs.
#[test]
fn removal_waits_for_late_unmaps() {
    with_a_host("riommu_remove");
}

/// A device reads only what its pool was given, no two buffers share a slot, and an empty pool
/// fails a map.
#[test]
fn pools_keep_buffers_apart() {
    with_a_host("pool");
}

/// The device's own IOMMU maps a pool, which stays until the last unmap of what drivers leave.
#[test]
fn pools_exist_while_their_device_needs_them() {
    with_a_host("pool_bind");
}
