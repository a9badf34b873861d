//! Writes operations as Parquet.

use std::io::{self, Read, Write};
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};

use super::{meta, schema};
use crate::error::TraceError;
use crate::op::{Chunk, Mark, Op, OpKind};
use crate::operations::Operations;

/// Approximate number of rows of a row group, which the writer holds in memory.
const GROUP_ROWS: usize = 128 * 1024;
/// Approximate number of segments of a row group.
const GROUP_SEGMENTS: usize = 1 << 20;

/// An error of a conversion.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The result cannot be written.
    #[error("cannot write the converted trace")]
    Write(io::Error),
}

impl From<ParquetError> for ConvertError {
    fn from(error: ParquetError) -> Self {
        Self::Write(match error {
            ParquetError::External(inner) => match inner.downcast::<io::Error>() {
                Ok(error) => *error,
                Err(other) => io::Error::other(other),
            },
            other => io::Error::other(other),
        })
    }
}

impl From<serde_json::Error> for ConvertError {
    fn from(error: serde_json::Error) -> Self {
        Self::Write(error.into())
    }
}

/// Counts of the written contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Number of operations.
    pub operations: u64,
    /// Number of marks.
    pub marks: u64,
    /// Number of row groups.
    pub groups: u64,
}

/// Writes all operations, marks, devices and the summary of a trace as Parquet. Memory: one row
/// group.
///
/// # Errors
/// [`ConvertError`].
pub fn write_parquet<R: Read, W: Write + Send>(
    operations: &mut Operations<R>,
    out: W,
) -> Result<Written, ConvertError> {
    let properties = Arc::new(schema::properties());
    let mut file = SerializedFileWriter::new(out, schema::schema()?, properties)?;
    let mut written = Written::default();
    let mut data = Data::default();
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk)? {
        let mut marks = chunk.marks.iter().peekable();
        for (index, op) in chunk.ops.iter().enumerate() {
            while let Some(mark) = marks.next_if(|mark| mark.before_op as usize <= index) {
                data.mark(mark);
                written.marks += 1;
            }
            data.op(op, &chunk);
            written.operations += 1;
            if data.is_full() {
                data.flush(&mut file, &mut written)?;
            }
        }
        for mark in marks {
            data.mark(mark);
            written.marks += 1;
        }
        if data.is_full() {
            data.flush(&mut file, &mut written)?;
        }
    }
    data.flush(&mut file, &mut written)?;
    let (version, number) = schema::VERSION;
    for (key, value) in [
        (version, number.to_owned()),
        (
            schema::DEVICES,
            meta::devices_to_json(operations.devices())?,
        ),
        (
            schema::SUMMARY,
            serde_json::to_string(operations.summary())?,
        ),
    ] {
        file.append_key_value_metadata(KeyValue::new(key.to_owned(), value));
    }
    // `finish` writes the footer but does not flush `out`.
    file.finish()?;
    file.flush().map_err(ConvertError::Write)?;
    Ok(written)
}

/// Values of an optional column, with one definition level per row.
#[derive(Debug, Default)]
struct Optional<T> {
    values: Vec<T>,
    levels: Vec<i16>,
}

impl<T> Optional<T> {
    fn push(&mut self, value: Option<T>) {
        self.levels.push(i16::from(value.is_some()));
        self.values.extend(value);
    }

    fn clear(&mut self) {
        self.values.clear();
        self.levels.clear();
    }
}

/// The rows of a row group, by columns in the order of [`schema::LEAVES`].
#[derive(Debug, Default)]
struct Data {
    time_ns: Vec<i64>,
    event: Vec<ByteArray>,
    device: Optional<i32>,
    cpu: Optional<i32>,
    lines: Optional<i32>,
    mapping: Optional<i32>,
    direction: Optional<ByteArray>,
    class: Optional<ByteArray>,
    flags: Optional<i32>,
    phys_addr: Vec<i64>,
    bytes: Vec<i64>,
    /// Levels of both fields of the list.
    definition: Vec<i16>,
    repetition: Vec<i16>,
    text: Optional<ByteArray>,
}

impl Data {
    fn is_full(&self) -> bool {
        self.time_ns.len() >= GROUP_ROWS || self.definition.len() >= GROUP_SEGMENTS
    }

    fn op(&mut self, op: &Op, chunk: &Chunk) {
        // Parquet stores an unsigned number in a signed one with the same bits.
        self.time_ns.push(op.time.0 as i64);
        self.device.push(Some(i32::from(op.device.0)));
        self.cpu.push(Some(i32::from(op.cpu)));
        self.lines.push(Some(i32::from(op.lines)));
        self.text.push(None);
        match op.kind {
            OpKind::Map {
                id,
                direction,
                class,
                flags,
                segments,
            } => {
                self.event.push(schema::MAP.into());
                self.mapping.push(Some(id.0 as i32));
                self.direction
                    .push(Some(schema::direction_name(direction).into()));
                self.class.push(Some(class.name().into()));
                self.flags.push(Some(i32::from(flags.bits())));
                let segments = chunk.segments_of(segments);
                for (index, segment) in segments.iter().enumerate() {
                    self.phys_addr.push(segment.start().get() as i64);
                    self.bytes.push(segment.bytes() as i64);
                    self.definition.push(1);
                    self.repetition.push(i16::from(index > 0));
                }
                if segments.is_empty() {
                    self.no_segments();
                }
            }
            OpKind::Unmap { id } => {
                self.event.push(schema::UNMAP.into());
                self.mapping.push(Some(id.0 as i32));
                self.no_map();
            }
        }
    }

    fn mark(&mut self, mark: &Mark) {
        self.time_ns.push(mark.time.0 as i64);
        self.event.push(schema::MARK.into());
        for column in [
            &mut self.device,
            &mut self.cpu,
            &mut self.lines,
            &mut self.mapping,
        ] {
            column.push(None);
        }
        self.text.push(Some(mark.text.as_str().into()));
        self.no_map();
    }

    /// Appends the empty map columns of a row that is not a map.
    fn no_map(&mut self) {
        self.direction.push(None);
        self.class.push(None);
        self.flags.push(None);
        self.no_segments();
    }

    fn no_segments(&mut self) {
        self.definition.push(0);
        self.repetition.push(0);
    }

    /// Writes the buffered rows as a row group, if there are any.
    fn flush<W: Write + Send>(
        &mut self,
        file: &mut SerializedFileWriter<W>,
        written: &mut Written,
    ) -> Result<(), ConvertError> {
        if self.time_ns.is_empty() {
            return Ok(());
        }
        let mut group = file.next_row_group()?;
        let group_ref = &mut group;
        put::<Int64Type, W>(group_ref, &self.time_ns, None, None)?;
        put::<ByteArrayType, W>(group_ref, &self.event, None, None)?;
        for column in [&self.device, &self.cpu, &self.lines, &self.mapping] {
            put::<Int32Type, W>(group_ref, &column.values, Some(&column.levels), None)?;
        }
        for column in [&self.direction, &self.class] {
            put::<ByteArrayType, W>(group_ref, &column.values, Some(&column.levels), None)?;
        }
        put::<Int32Type, W>(
            group_ref,
            &self.flags.values,
            Some(&self.flags.levels),
            None,
        )?;
        let levels = (Some(&self.definition[..]), Some(&self.repetition[..]));
        put::<Int64Type, W>(group_ref, &self.phys_addr, levels.0, levels.1)?;
        put::<Int64Type, W>(group_ref, &self.bytes, levels.0, levels.1)?;
        put::<ByteArrayType, W>(group_ref, &self.text.values, Some(&self.text.levels), None)?;
        group.close()?;
        written.groups += 1;
        self.clear();
        Ok(())
    }

    fn clear(&mut self) {
        self.time_ns.clear();
        self.event.clear();
        for column in [
            &mut self.device,
            &mut self.cpu,
            &mut self.lines,
            &mut self.mapping,
            &mut self.flags,
        ] {
            column.clear();
        }
        for column in [&mut self.direction, &mut self.class, &mut self.text] {
            column.clear();
        }
        for column in [&mut self.phys_addr, &mut self.bytes] {
            column.clear();
        }
        self.definition.clear();
        self.repetition.clear();
    }
}

/// Writes the next column of the group.
fn put<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    values: &[T::T],
    definition: Option<&[i16]>,
    repetition: Option<&[i16]>,
) -> Result<(), ParquetError> {
    let missing = || ParquetError::General("more columns than the schema has".to_owned());
    let mut column = group.next_column()?.ok_or_else(missing)?;
    column
        .typed::<T>()
        .write_batch(values, definition, repetition)?;
    column.close()
}
