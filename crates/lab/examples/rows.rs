//! Prints the rows of a comparison as JSON: `rows TRACE [MODE...]`.
use ringfence_lab::{
    compare::{Options, compare},
    modes::Mode,
};
use ringfence_trace::{Operations, Options as TraceOptions};
use std::io::BufReader;

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap();
    let modes: Vec<String> = args.collect();
    let mut options = Options::new();
    if let Ok(r) = std::env::var("REPS") {
        options.repetitions = r.parse().unwrap();
    }
    if std::env::var("QUIET").is_ok() {
        options.hostile = false;
    }
    if !modes.is_empty() {
        options.modes = modes.iter().map(|m| Mode::find(m).unwrap()).collect();
    }
    let start = std::time::Instant::now();
    let ops = Operations::open(std::path::Path::new(&path), TraceOptions::default()).unwrap();
    let c = compare(&path, ops, &options, |_| ()).unwrap();
    for r in &c.rows {
        println!(
            "{:15} {:8} map {:8.1} unmap {:8.1} | alloc {:7.1} tab {:5.1} oth {:5.1} | find {:6.1} free {:6.1} tab {:5.1} inv {:5.1} chg {:7.1} oth {:5.1} | spread {:4.2} {:4.2} | search {:6.2} {:5} inv {:6} hit {:4.2} live {:4} tb {:6} acc {:6} att {:7} viol {:6} col {:6} ff {} win {} rel {} thr {:4.2} {}",
            r.mode,
            r.safety,
            r.map_cycles,
            r.unmap_cycles,
            r.components.cycles.map_iova_alloc,
            r.components.cycles.map_table,
            r.components.cycles.map_other,
            r.components.cycles.unmap_iova_find,
            r.components.cycles.unmap_iova_free,
            r.components.cycles.unmap_table,
            r.components.cycles.unmap_invalidation,
            r.components.cycles.unmap_invalidation_charged,
            r.components.cycles.unmap_other,
            r.components.order_spread,
            r.components.repetition_spread,
            r.search_len_mean,
            r.search_len_max,
            r.invalidations,
            r.iotlb_hit_rate,
            r.live_max,
            r.table_bytes,
            r.accesses,
            r.attempts,
            r.violations.total,
            r.colocated,
            r.false_faults,
            r.stale_window_max_ns,
            r.release_delay_max_ns,
            r.relative_throughput,
            r.status
        );
    }
    eprintln!(
        "{:?} lines {} bursts {} cut {} ",
        start.elapsed(),
        c.lines,
        c.bursts,
        c.bursts_cut_by_map
    );
    let _ = BufReader::new(std::io::empty());
}
