//! Prints the summary of each trace named on the command line.

use std::path::Path;

use ringfence_trace::{Chunk, Operations, TraceError, TraceOptions};

fn main() -> Result<(), TraceError> {
    for name in std::env::args().skip(1) {
        let mut operations = Operations::open(Path::new(&name), TraceOptions::default())?;
        let mut chunk = Chunk::default();
        let (mut ops, mut segments, mut lines) = (0, 0, 0u64);
        while operations.next_chunk(&mut chunk)? {
            ops += chunk.ops.len();
            segments += chunk.segments.len();
            lines += chunk.ops.iter().map(|op| u64::from(op.lines)).sum::<u64>();
        }
        println!("{name}: {ops} operations of {lines} lines, {segments} segments");
        for (index, device) in operations.devices().iter() {
            let counts = operations.summary().devices.get(index.index());
            println!("  {} {:?} {counts:?}", device.name, device.kind);
        }
        println!("  {:?}", operations.summary());
    }
    Ok(())
}
