//! Inputs of X14: the clients of its benchmarks and its clock.

use super::*;

/// EIOVAR section 7: ApacheBench has 100 concurrent requests, and memslap 16 (claims.csv E25, E26).
#[test]
fn benchmarks_have_the_clients_of_the_paper() {
    for (benchmark, clients) in [
        (Benchmark::Apache1M, 100),
        (Benchmark::Apache1K, 100),
        (Benchmark::Memcached, 16),
    ] {
        assert_eq!(workload(benchmark).clients(), clients, "{benchmark:?}");
    }
}

/// The history reads a clock that advances: every mode has cycles of allocations and of frees.
#[test]
fn calls_are_timed_by_a_clock_that_advances() {
    for nic in ["mlx", "brcm"] {
        for (name, _) in BENCHMARKS {
            for mode in ["strict", "strict+", "defer", "defer+"] {
                for metric in ["alloc_cycles", "dealloc_cycles"] {
                    let what = format!("{nic} {name}, {mode}: {metric}");
                    assert!(measured(&FOUND.rows, &what).median > 0.0, "{what}");
                }
            }
        }
    }
}
