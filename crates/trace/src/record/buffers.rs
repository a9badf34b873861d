//! Reads the buffers of an instance: their text, and the events that they lost.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

use super::RecordError;

pub(super) fn copy(from: &Path, out: &mut impl Write) -> Result<u64, RecordError> {
    let fail = |error| RecordError::at(from, error);
    let mut file = fs::File::open(from).map_err(fail)?;
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let count = match file.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other.map_err(fail)?,
        };
        let part = buffer.get(..count).unwrap_or(&[]);
        out.write_all(part)
            .map_err(|source| RecordError::Output { source })?;
        bytes += count as u64;
    }
}

/// Events that the buffer of one CPU lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferLoss {
    pub(super) processor: u32,
    /// Events that later events overwrote; the text's header counts them.
    overwritten: u64,
    /// Events that never entered the buffer: it was full, or interrupts nested too deep.
    pub(super) dropped: u64,
}

impl BufferLoss {
    pub(super) fn total(&self) -> u64 {
        self.overwritten.saturating_add(self.dropped)
    }
}

/// Reads `per_cpu/cpu*/stats` (ftrace.rst, "per_cpu/cpu0/stats") of all CPUs.
pub(super) fn losses(instance: &Path) -> Result<Vec<BufferLoss>, RecordError> {
    let per_cpu = instance.join("per_cpu");
    let mut losses = Vec::new();
    let entries = fs::read_dir(&per_cpu).map_err(|error| RecordError::at(&per_cpu, error))?;
    for entry in entries {
        let entry = entry.map_err(|error| RecordError::at(&per_cpu, error))?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("cpu"));
        let Some(Ok(processor)) = number.map(str::parse) else {
            continue;
        };
        let path = entry.path().join("stats");
        let text = fs::read_to_string(&path).map_err(|error| RecordError::at(&path, error))?;
        let mut loss = BufferLoss {
            processor,
            overwritten: 0,
            dropped: 0,
        };
        for (key, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim().parse().unwrap_or(0);
            match key.trim() {
                "overrun" => loss.overwritten = value,
                "commit overrun" | "dropped events" => {
                    loss.dropped = loss.dropped.saturating_add(value);
                }
                _ => {}
            }
        }
        losses.push(loss);
    }
    losses.sort_unstable_by_key(|loss| loss.processor);
    Ok(losses)
}
