//! The row of a task as a Parquet file.

use std::collections::HashMap;
use std::sync::Arc;

use parquet::basic::{ConvertedType, Repetition, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::types::Type;
use serde_json::Value;

use crate::columns::{ColumnType, TASK, columns, row_values};
use crate::combine::{ADDITIVE, MAXIMA};
use crate::machine::Machine;
use crate::run::Outcome;
use crate::seal;
use crate::task::Task;

/// The file of a task cannot be composed: a defect, or the system is short of memory.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The Parquet writer failed.
    #[error("cannot write the row as Parquet: {0}")]
    Parquet(#[from] ParquetError),
    /// The Parquet writer composed no Parquet file.
    #[error("defect in ringfence: the row is no Parquet file")]
    NoParquet,
}

/// Columns of a row that describe the replay and hold for one device as they do for all.
const DESCRIPTIONS: [&str; 5] = ["iommu", "safety", "bound", "status", "status_code"];

/// Returns the file of a task: one row group with one row, sealed. The columns are those of
/// [`columns`]; a failed task has only those of the task. A task of one device of a trace has only
/// columns that combine over the devices.
///
/// # Errors
/// The Parquet writer fails.
pub fn encode(task: &Task, outcome: &Outcome, machine: &Machine) -> Result<Vec<u8>, EncodeError> {
    let of_task = task_values(task, outcome, machine);
    let names = of_task.iter().map(|(name, _)| *name);
    debug_assert!(names.eq(TASK.iter().map(|(name, _)| *name)));
    let mut values: HashMap<String, Value> = of_task
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    if let Ok(row) = &outcome.result {
        let combines = |name: &str| {
            task.content.device.is_none()
                || [ADDITIVE, MAXIMA, &DESCRIPTIONS]
                    .iter()
                    .any(|list| list.contains(&name))
        };
        for (name, value) in row_values(row) {
            if combines(&name) {
                values.entry(name).or_insert(value);
            }
        }
    }
    let properties = WriterProperties::builder()
        .set_created_by(concat!("ringfence ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_dictionary_enabled(false);
    let mut file = SerializedFileWriter::new(Vec::new(), schema()?, Arc::new(properties.build()))?;
    let mut group = file.next_row_group()?;
    for column in columns() {
        let Some(mut writer) = group.next_column()? else {
            break;
        };
        let value = values.get(&column.name).unwrap_or(&Value::Null);
        match column.kind {
            ColumnType::Text => {
                write::<ByteArrayType>(&mut writer, value.as_str().map(ByteArray::from))?;
            }
            ColumnType::Count => {
                write::<Int64Type>(&mut writer, value.as_u64().map(u64::cast_signed))?;
            }
            ColumnType::Float => write::<DoubleType>(&mut writer, value.as_f64())?,
            ColumnType::Flag => write::<BoolType>(&mut writer, value.as_bool())?,
        }
        writer.close()?;
    }
    group.close()?;
    let bytes = file.into_inner()?;
    let failed = outcome.result.is_err();
    seal::seal(&task.name, &bytes, failed).ok_or(EncodeError::NoParquet)
}

/// Returns the values of the columns of a task.
fn task_values<'a>(
    task: &'a Task,
    outcome: &'a Outcome,
    machine: &'a Machine,
) -> Vec<(&'static str, Value)> {
    let content = &task.content;
    let cycles = content.cache_cycles;
    let (name, error) = match &outcome.result {
        Ok(_) => ("ok", None),
        Err(error) => ("failed", Some(error.as_str())),
    };
    vec![
        ("task", task.name.as_str().into()),
        ("outcome", name.into()),
        ("error", error.into()),
        ("trace", task.trace.as_str().into()),
        ("digest", content.digest.as_str().into()),
        ("device", content.device.as_deref().into()),
        ("mode", content.mode.as_str().into()),
        ("profile", content.profile.name.as_str().into()),
        ("iotlb_sets", content.profile.iotlb_sets.into()),
        ("iotlb_ways", content.profile.iotlb_ways.into()),
        ("ring_entries", content.ring_entries.into()),
        (
            "rtc_period_ns",
            cycles.map(|cycles| cycles.period_ns).into(),
        ),
        ("rtc_periods_kept", cycles.map(|cycles| cycles.kept).into()),
        ("attack", content.attack.into()),
        ("repetitions", content.repetitions.into()),
        ("output", content.output.into()),
        ("engine", content.engine.as_str().into()),
        ("machine", machine.id.as_str().into()),
        ("cpu", machine.cpu.as_str().into()),
        ("arch", machine.arch.into()),
        ("build", machine.build.into()),
        ("task_seconds", outcome.seconds.into()),
    ]
}

fn schema() -> Result<Arc<Type>, ParquetError> {
    let fields = columns().iter().map(|column| {
        let (physical, converted) = match column.kind {
            ColumnType::Text => (Physical::BYTE_ARRAY, ConvertedType::UTF8),
            ColumnType::Count => (Physical::INT64, ConvertedType::UINT_64),
            ColumnType::Float => (Physical::DOUBLE, ConvertedType::NONE),
            ColumnType::Flag => (Physical::BOOLEAN, ConvertedType::NONE),
        };
        let field = Type::primitive_type_builder(&column.name, physical)
            .with_repetition(Repetition::OPTIONAL)
            .with_converted_type(converted)
            .build()?;
        Ok(Arc::new(field))
    });
    let fields = fields.collect::<Result<Vec<_>, ParquetError>>()?;
    let root = Type::group_type_builder("ringfence_sweep").with_fields(fields);
    Ok(Arc::new(root.build()?))
}

/// Writes the one value of a column, or null.
fn write<T: DataType>(
    writer: &mut SerializedColumnWriter<'_>,
    value: Option<T::T>,
) -> Result<(), ParquetError> {
    let level = [i16::from(value.is_some())];
    let values: Vec<T::T> = value.into_iter().collect();
    writer
        .typed::<T>()
        .write_batch(&values, Some(&level), None)?;
    Ok(())
}
