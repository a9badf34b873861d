//! Reads operations from Parquet, one chunk at a time.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use ringfence_types::{Direction, Nanos};

use super::check::Checker;
use super::column::{Column, check_group, column};
use super::{footer, meta, schema};
use crate::devices::Devices;
use crate::error::TraceError;
use crate::interrupt::Interrupt;
use crate::limits::{LimitExceeded, TraceLimits, mark_text};
use crate::op::{Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Mark, Op, OpKind, SegmentSpan};
use crate::problem::ParquetProblem;
use crate::summary::Summary;

/// Maximum size of a footer: a thousand million operations in groups of the size that this crate
/// writes.
const MAX_FOOTER: u32 = 16 << 20;

/// The last bytes of a file that is not encrypted.
const MAGIC: &[u8; 4] = b"PAR1";

/// The rows of a file. Memory: one chunk and one page of each column.
pub(crate) struct Rows {
    name: String,
    file: Arc<File>,
    metadata: ParquetMetaData,
    file_bytes: u64,
    /// Bytes of the columns of the groups opened so far.
    group_bytes: u64,
    next_group: usize,
    group: Option<Group>,
    /// Number of rows read.
    row: u64,
    checker: Checker,
    /// Rows and segments of the groups opened so far, and their limit.
    values: u64,
    most_values: u64,
    devices: Devices,
    summary: Summary,
    ended: bool,
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows")
            .field("name", &self.name)
            .field("next_group", &self.next_group)
            .field("row", &self.row)
            .finish_non_exhaustive()
    }
}

/// The columns of a row group, in the order of [`schema::LEAVES`].
struct Group {
    rows_left: usize,
    time_ns: Column<Int64Type>,
    event: Column<ByteArrayType>,
    device: Column<Int32Type>,
    cpu: Column<Int32Type>,
    lines: Column<Int32Type>,
    mapping: Column<Int32Type>,
    direction: Column<ByteArrayType>,
    class: Column<ByteArrayType>,
    flags: Column<Int32Type>,
    phys_addr: Column<Int64Type>,
    bytes: Column<Int64Type>,
    text: Column<ByteArrayType>,
}

/// Runs the decoder, an external crate, on untrusted input. A panic counts as a damaged file; the
/// caller does not reuse the state that the decoder worked on.
fn guarded<T>(work: impl FnOnce() -> Result<T, ParquetProblem>) -> Result<T, ParquetProblem> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(ParquetProblem::Damaged {
            message: "the decoder gave up".to_owned(),
        })
    })
}

pub(super) fn damaged(error: ParquetError) -> ParquetProblem {
    ParquetProblem::Damaged {
        message: error.to_string(),
    }
}

impl Rows {
    /// Returns the name that errors show.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Opens a file and reads its footer.
    ///
    /// # Errors
    /// [`TraceError::Io`], [`TraceError::Parquet`].
    pub(crate) fn open(path: &Path, limits: TraceLimits) -> Result<Self, TraceError> {
        let name = path.display().to_string();
        let io = |source| TraceError::Io {
            file: path.display().to_string(),
            line: 0,
            source,
        };
        let mut file = File::open(path).map_err(io)?;
        let mut tail = [0; 8];
        let file_bytes = file.seek(SeekFrom::End(0)).map_err(io)?;
        let problem = |problem| TraceError::Parquet {
            file: path.display().to_string(),
            problem,
        };
        if file_bytes >= 12 {
            file.seek(SeekFrom::End(-8)).map_err(io)?;
            file.read_exact(&mut tail).map_err(io)?;
        }
        let [a, b, c, d, magic @ ..] = tail;
        let footer = u32::from_le_bytes([a, b, c, d]);
        if footer > MAX_FOOTER || u64::from(footer) + 12 > file_bytes {
            let message = format!("a footer of {footer} bytes");
            return Err(problem(ParquetProblem::Damaged { message }));
        }
        if magic != *MAGIC {
            let message = "the file does not end with PAR1".to_owned();
            return Err(problem(ParquetProblem::Damaged { message }));
        }
        let start = file_bytes - 8 - u64::from(footer);
        file.seek(SeekFrom::Start(start)).map_err(io)?;
        let mut bytes = Vec::new();
        let mut tail = (&mut file).take(u64::from(footer));
        tail.read_to_end(&mut bytes).map_err(io)?;
        footer::check(&bytes).map_err(problem)?;
        // Decode the checked bytes: the file may change meanwhile.
        let metadata = guarded(|| ParquetMetaDataReader::decode_metadata(&bytes).map_err(damaged));
        Self::new(name, file, file_bytes, metadata.map_err(problem)?, limits).map_err(problem)
    }

    fn new(
        name: String,
        file: File,
        file_bytes: u64,
        metadata: ParquetMetaData,
        limits: TraceLimits,
    ) -> Result<Self, ParquetProblem> {
        let file_metadata = metadata.file_metadata();
        let value = |key: &'static str| {
            let pairs = file_metadata.key_value_metadata().into_iter().flatten();
            let mut values = pairs.filter(|pair| pair.key == key);
            values.find_map(|pair| pair.value.as_deref())
        };
        let (key, version) = schema::VERSION;
        if value(key) != Some(version) {
            return Err(ParquetProblem::Metadata { key });
        }
        let key = schema::DEVICES;
        let devices = value(key).and_then(meta::devices_from_json);
        let devices = devices.ok_or(ParquetProblem::Metadata { key })?;
        let key = schema::SUMMARY;
        let summary = value(key).and_then(|json| serde_json::from_str(json).ok());
        let summary = summary.ok_or(ParquetProblem::Metadata { key })?;

        let leaves = file_metadata.schema_descr().columns();
        for index in 0..leaves.len().max(schema::COLUMNS) {
            let expected = schema::LEAVES.get(index);
            let path = expected.map_or("", |expected| expected.path);
            let same = expected
                .zip(leaves.get(index))
                .is_some_and(|(expected, leaf)| {
                    leaf.path().string() == expected.path
                        && leaf.physical_type() == expected.physical
                        && (leaf.max_def_level(), leaf.max_rep_level()) == expected.shape.levels()
                });
            if !same {
                return Err(ParquetProblem::Column { index, path });
            }
        }
        Ok(Self {
            name,
            file: Arc::new(file),
            metadata,
            file_bytes,
            group_bytes: 0,
            next_group: 0,
            group: None,
            row: 0,
            values: 0,
            most_values: limits.rows_of(file_bytes),
            checker: Checker::new(limits, file_bytes),
            devices,
            summary,
            ended: false,
        })
    }

    /// Fills `chunk` as [`Operations::next_chunk`](crate::Operations::next_chunk) does.
    pub(crate) fn next_chunk(
        &mut self,
        chunk: &mut Chunk,
        interrupt: &Interrupt,
    ) -> Result<bool, TraceError> {
        chunk.clear();
        if self.ended {
            return Ok(false);
        }
        if interrupt.is_set() {
            self.ended = true;
            let file = self.name.clone();
            return Err(TraceError::Interrupted { file });
        }
        match guarded(|| self.fill(chunk)) {
            Ok(more) => {
                self.ended = !more;
                Ok(more)
            }
            Err(problem) => Err(self.refuse(problem)),
        }
    }

    /// Ends the read with an error.
    pub(crate) fn refuse(&mut self, problem: ParquetProblem) -> TraceError {
        self.ended = true;
        TraceError::Parquet {
            file: self.name.clone(),
            problem,
        }
    }

    /// Returns the devices of the file.
    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Returns the summary of the trace that the file was converted from.
    pub(crate) fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Returns the mappings that are live after the rows read so far.
    pub(crate) fn live(&self) -> impl Iterator<Item = MappingId> {
        self.checker.live()
    }

    /// Reads a chunk of rows of the current group. Returns false at the end.
    fn fill(&mut self, chunk: &mut Chunk) -> Result<bool, ParquetProblem> {
        let group = loop {
            match &mut self.group {
                Some(group) if group.rows_left > 0 => break group,
                _ => match self.open_group()? {
                    Some(group) => self.group = Some(group),
                    None => return Ok(false),
                },
            }
        };
        let rows = group.rows_left.min(Chunk::OPS);
        group.rows_left -= rows;
        group.read(rows)?;
        for _ in 0..rows {
            let row = self.row;
            group
                .row(chunk, &mut self.checker, &self.devices, row)
                .map_err(|wrong| match wrong {
                    RowError::Column(path) => ParquetProblem::Row { row, path },
                    RowError::LimitExceeded(excess) => ParquetProblem::Limit { row, excess },
                })?;
            self.row += 1;
        }
        Ok(true)
    }

    /// Opens the next row group; `None` after the last.
    fn open_group(&mut self) -> Result<Option<Group>, ParquetProblem> {
        let number = self.next_group;
        let Some(group) = self.metadata.row_groups().get(number) else {
            return Ok(None);
        };
        self.next_group += 1;
        let size = check_group(group, number, self.file_bytes)?;
        // Columns that share bytes would cost their time more than once.
        self.group_bytes = self.group_bytes.saturating_add(size.bytes);
        if self.group_bytes > self.file_bytes {
            let message = format!("the columns up to row group {number} exceed the file");
            return Err(ParquetProblem::Damaged { message });
        }
        self.values = self.values.saturating_add(size.values);
        if self.values > self.most_values {
            return Err(ParquetProblem::Limit {
                row: self.row,
                excess: LimitExceeded::Rows {
                    limit: self.most_values,
                },
            });
        }
        let file = &self.file;
        Ok(Some(Group {
            rows_left: size.rows,
            time_ns: column(file, group, 0),
            event: column(file, group, 1),
            device: column(file, group, 2),
            cpu: column(file, group, 3),
            lines: column(file, group, 4),
            mapping: column(file, group, 5),
            direction: column(file, group, 6),
            class: column(file, group, 7),
            flags: column(file, group, 8),
            phys_addr: column(file, group, 9),
            bytes: column(file, group, 10),
            text: column(file, group, 11),
        }))
    }
}

/// Reason why a row is not a valid operation.
enum RowError {
    /// Path of the invalid column.
    Column(&'static str),
    /// A limit that the trace exceeds.
    LimitExceeded(LimitExceeded),
}

impl From<&'static str> for RowError {
    fn from(path: &'static str) -> Self {
        Self::Column(path)
    }
}

impl From<LimitExceeded> for RowError {
    fn from(excess: LimitExceeded) -> Self {
        Self::LimitExceeded(excess)
    }
}

/// Fails with the path of the first column that has a value where the event allows none.
fn check_absent(columns: &[(bool, &'static str)]) -> Result<(), RowError> {
    match columns.iter().find(|(present, _)| *present) {
        Some((_, path)) => Err((*path).into()),
        None => Ok(()),
    }
}

impl Group {
    fn read(&mut self, rows: usize) -> Result<(), ParquetProblem> {
        self.time_ns.read(rows)?;
        self.event.read(rows)?;
        self.device.read(rows)?;
        self.cpu.read(rows)?;
        self.lines.read(rows)?;
        self.mapping.read(rows)?;
        self.direction.read(rows)?;
        self.class.read(rows)?;
        self.flags.read(rows)?;
        self.phys_addr.read(rows)?;
        self.bytes.read(rows)?;
        self.text.read(rows)
    }

    /// Reads the next row. Every column advances by one row, to stay aligned with the others.
    fn row(
        &mut self,
        chunk: &mut Chunk,
        checker: &mut Checker,
        devices: &Devices,
        row: u64,
    ) -> Result<(), RowError> {
        let time = *self.time_ns.required().ok_or("time_ns")? as u64;
        if !checker.time(time) {
            return Err("time_ns".into());
        }
        let event = text(self.event.required()).ok_or("event")?;
        let device = number::<u16>(self.device.optional(), "device")?;
        let cpu = number::<u16>(self.cpu.optional(), "cpu")?;
        let lines = number::<u16>(self.lines.optional(), "lines")?;
        // Parquet stores the unsigned number in a signed one with the same bits.
        let mapping = self.mapping.optional().map(|&id| MappingId(id as u32));
        let direction = self.direction.optional();
        let class = self.class.optional();
        let flags = number::<u8>(self.flags.optional(), "flags")?;
        let starts = self.phys_addr.list();
        let sizes = self.bytes.list();
        let words = self.text.optional();

        if event != schema::MAP {
            check_absent(&[
                (direction.is_some(), "direction"),
                (class.is_some(), "class"),
                (flags.is_some(), "flags"),
                (!starts.is_empty(), "segments.list.element.phys_addr"),
                (!sizes.is_empty(), "segments.list.element.bytes"),
            ])?;
        }
        if event == schema::MARK {
            check_absent(&[
                (device.is_some(), "device"),
                (cpu.is_some(), "cpu"),
                (lines.is_some(), "lines"),
                (mapping.is_some(), "mapping"),
            ])?;
            let words = mark_text(text(words).ok_or("text")?.as_bytes());
            checker.budget.mark(words.len(), checker.progress(row))?;
            chunk.marks.push(Mark {
                before_op: u32::try_from(chunk.ops.len()).unwrap_or(u32::MAX),
                time: Nanos(time),
                text: words,
            });
            return Ok(());
        }
        if words.is_some() {
            return Err("text".into());
        }
        let device = device.map(DeviceIndex).ok_or("device")?;
        devices.get(device).ok_or("device")?;
        let id = mapping.ok_or("mapping")?;
        let kind = match event {
            schema::UNMAP => {
                if !checker.unmap(id.0, device) {
                    return Err("mapping".into());
                }
                OpKind::Unmap { id }
            }
            schema::MAP => {
                let direction = text(direction).and_then(direction_of).ok_or("direction")?;
                let class = text(class).and_then(class_of).ok_or("class")?;
                let flags = flags.and_then(MapFlags::from_bits).ok_or("flags")?;
                let segments = segments(starts, sizes, chunk)?;
                let placed = chunk.segments_of(segments);
                checker.budget.admit(placed, checker.progress(row))?;
                if !checker.map(id.0, device) {
                    return Err("mapping".into());
                }
                checker.budget.map(id.index(), placed);
                OpKind::Map {
                    id,
                    direction,
                    class,
                    flags,
                    segments,
                }
            }
            _ => return Err("event".into()),
        };
        chunk.ops.push(Op {
            time: Nanos(time),
            device,
            cpu: cpu.ok_or("cpu")?,
            lines: lines.ok_or("lines")?,
            kind,
        });
        Ok(())
    }
}

/// Appends the segments of a row to the chunk.
fn segments(starts: &[i64], sizes: &[i64], chunk: &mut Chunk) -> Result<SegmentSpan, &'static str> {
    let bytes = "segments.list.element.bytes";
    if starts.is_empty() {
        return Err("segments.list.element.phys_addr");
    }
    if starts.len() != sizes.len() {
        return Err(bytes);
    }
    let first = u32::try_from(chunk.segments.len()).map_err(|_| bytes)?;
    for (&start, &size) in starts.iter().zip(sizes) {
        let segment = Checker::segment(start as u64, size as u64).ok_or(bytes)?;
        chunk.segments.push(segment);
    }
    let count = u32::try_from(starts.len()).map_err(|_| bytes)?;
    Ok(SegmentSpan { first, count })
}

fn text(bytes: Option<&ByteArray>) -> Option<&str> {
    std::str::from_utf8(bytes?.data()).ok()
}

/// Converts a number to its type, if it is present and in range.
fn number<T: TryFrom<i32>>(
    value: Option<&i32>,
    path: &'static str,
) -> Result<Option<T>, &'static str> {
    value
        .map(|&value| T::try_from(value).map_err(|_| path))
        .transpose()
}

fn direction_of(name: &str) -> Option<Direction> {
    let mut all = Direction::ALL.into_iter();
    all.find(|&direction| schema::direction_name(direction) == name)
}

fn class_of(name: &str) -> Option<MapClass> {
    let mut all = MapClass::ALL.into_iter();
    all.find(|&class| class.name() == name)
}
