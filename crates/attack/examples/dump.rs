use ringfence_attack::{CLASSES, Status, run};
use ringfence_lab::modes::Mode;
fn main() {
    let only: Vec<String> = std::env::args().skip(1).collect();
    for class in CLASSES
        .iter()
        .filter(|c| c.is_executed() && (only.is_empty() || only.contains(&c.id.to_string())))
    {
        for mode in Mode::named() {
            let t = std::time::Instant::now();
            let m = match run(
                std::slice::from_ref(&mode),
                &[class],
                &ringfence_attack::Options { scan_pages: 8192 },
                |_| {},
            ) {
                Ok(m) => m,
                Err(e) => {
                    println!("{} {:22} ERROR {e}", class.id, mode.name);
                    continue;
                }
            };
            let c = &m.cells[0];
            let _ = Status::Stopped;
            println!(
                "{} {:22} {:?} exp {:?} {} s={}/{} b={} ns={:?} un={:?} ff={} {:?} {:?}",
                class.id,
                mode.name,
                c.status,
                c.expected,
                if c.unexpected { "UNEXPECTED" } else { "" },
                c.total.successes,
                c.total.attempts,
                c.total.bytes,
                c.total.last_success_ns,
                c.total.last_success_unmaps,
                c.total.false_faults,
                c.executed.notes,
                t.elapsed()
            );
        }
    }
}
