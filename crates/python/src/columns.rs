//! The rows of reports as one Arrow batch.

use std::sync::Arc;

use arrow_array::{ArrayRef, BooleanArray, Float64Array, RecordBatch, StringArray, UInt64Array};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use ringfence_report::{CellType, Column};
use serde_json::Value;

/// Returns the batch of `columns`. Every column is nullable.
pub(crate) fn batch(columns: &[Column]) -> Result<RecordBatch, ArrowError> {
    let fields: Vec<Field> = columns
        .iter()
        .map(|column| Field::new(&column.name, data_type(column.cell_type), true))
        .collect();
    let arrays = columns.iter().map(array).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays)
}

fn data_type(cell_type: CellType) -> DataType {
    match cell_type {
        CellType::Bool => DataType::Boolean,
        CellType::Unsigned => DataType::UInt64,
        CellType::Float => DataType::Float64,
        CellType::Text => DataType::Utf8,
    }
}

fn array(column: &Column) -> ArrayRef {
    let cells = column.cells.iter();
    match column.cell_type {
        CellType::Bool => Arc::new(cells.map(Value::as_bool).collect::<BooleanArray>()),
        CellType::Unsigned => Arc::new(cells.map(Value::as_u64).collect::<UInt64Array>()),
        CellType::Float => Arc::new(cells.map(Value::as_f64).collect::<Float64Array>()),
        CellType::Text => Arc::new(cells.map(Value::as_str).collect::<StringArray>()),
    }
}
