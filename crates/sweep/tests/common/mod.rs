//! Plans and traces for the tests.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use ringfence_sweep::{Plan, Task};
use tempfile::TempDir;

/// Directory that disappears at the end of a test.
pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("ringfence-").tempdir();
        Self(dir.unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Expands the plan `text`, whose paths are relative to this directory.
    pub(crate) fn tasks(&self, text: &str) -> Vec<Task> {
        let plan = Plan::parse(&self.path().join("plan.toml"), text).unwrap();
        plan.tasks().unwrap()
    }
}

/// Returns a trace in which `devices` map and unmap buffers in turn, on two CPUs. `seed` chooses
/// sizes, directions and lifetimes.
pub(crate) fn trace(devices: u32, maps: u32, seed: u64) -> String {
    let mut state = seed;
    let mut next = move |bound: u64| {
        // Knuth, MMIX.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    let mut text = String::from("# tracer: nop\n");
    let mut live = Vec::new();
    let mut micros = 1_000_000_u64;
    let mut line = |text: &mut String, event: String| {
        micros += 7;
        let (cpu, seconds, rest) = (micros % 2, micros / 1_000_000, micros % 1_000_000);
        let _ = writeln!(text, "  t-1  [00{cpu}] .....  {seconds}.{rest:06}: {event}");
    };
    for map in 0..u64::from(maps) {
        let device = format!("0000:00:0{}.0", 3 + next(u64::from(devices)));
        let direction = ["TO_DEVICE", "FROM_DEVICE"][usize::from(next(2) == 0)];
        let (iova, phys) = (0x1000_0000 + (map << 14), 0x100_0000 + (next(4096) << 14));
        let size = 64 + next(9000);
        line(
            &mut text,
            format!(
                "dma_map_phys: {device} dir={direction} dma_addr={iova:x} size={size} \
                phys_addr={phys:x} attrs="
            ),
        );
        live.push(format!(
            "dma_unmap_phys: {device} dir={direction} dma_addr={iova:x} size={size} attrs="
        ));
        if live.len() > 24 {
            let index = next(8) as usize;
            line(&mut text, live.remove(index));
        }
    }
    for unmap in live {
        line(&mut text, unmap);
    }
    text
}

/// The values of a file's only row, by column.
pub(crate) fn row(bytes: Vec<u8>) -> BTreeMap<String, Field> {
    let reader = SerializedFileReader::new(::bytes::Bytes::from(bytes)).unwrap();
    let mut rows: Vec<_> = reader.get_row_iter(None).unwrap().collect();
    assert_eq!(rows.len(), 1);
    let row = rows.remove(0).unwrap();
    let fields = row.get_column_iter();
    fields
        .map(|(name, field)| (name.clone(), field.clone()))
        .collect()
}
