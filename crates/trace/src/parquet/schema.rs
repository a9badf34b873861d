//! The columns of the file.
//!
//! | column | type | rows | contents |
//! |---|---|---|---|
//! | `time_ns` | uint64 | all | time of the event |
//! | `event` | string | all | `map`, `unmap`, `mark` |
//! | `device` | uint16 | map, unmap | row in the metadata `ringfence.devices` |
//! | `cpu` | uint16 | map, unmap | CPU that printed the event |
//! | `lines` | uint16 | map, unmap | number of trace lines that the operation represents |
//! | `mapping` | uint32 | map, unmap | pairs an unmap with its map |
//! | `direction` | string | map | `to-device`, `from-device`, `bidirectional` |
//! | `class` | string | map | `single`, `sg`, `coherent`, `iommu-only` |
//! | `flags` | uint8 | map | [`MapFlags`](crate::MapFlags) |
//! | `segments` | list of (`phys_addr` uint64, `bytes` uint64) | map; else empty | the buffer |
//! | `text` | string | mark | text of the mark |

use std::sync::Arc;

use parquet::basic::{ConvertedType, Encoding, Repetition, Type as Physical};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::{ColumnPath, Type, TypePtr};
use ringfence_types::Direction;

/// Key and value of the metadata that identify the version of the schema.
pub(super) const VERSION: (&str, &str) = ("ringfence.schema", "1");
/// Key of the devices, as JSON.
pub(super) const DEVICES: &str = "ringfence.devices";
/// Key of the summary, as JSON.
pub(super) const SUMMARY: &str = "ringfence.summary";

/// Values of `event`.
pub(super) const MAP: &str = "map";
pub(super) const UNMAP: &str = "unmap";
pub(super) const MARK: &str = "mark";

/// Values of `direction`.
pub(super) const fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::ToDevice => "to-device",
        Direction::FromDevice => "from-device",
        Direction::Bidirectional => "bidirectional",
    }
}

/// Storage of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Each row has one value.
    Required,
    /// Each row has one value or none.
    Optional,
    /// A field of the list of segments.
    Segments,
}

impl Shape {
    /// Returns the maximum definition level and the maximum repetition level.
    pub(super) const fn levels(self) -> (i16, i16) {
        match self {
            Self::Required => (0, 0),
            Self::Optional => (1, 0),
            Self::Segments => (1, 1),
        }
    }
}

/// A leaf column.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    /// Path, separated by dots.
    pub(super) path: &'static str,
    pub(super) physical: Physical,
    pub(super) shape: Shape,
    converted: ConvertedType,
    /// True if values repeat, so that a dictionary saves space.
    dictionary: bool,
}

const fn column(
    path: &'static str,
    physical: Physical,
    shape: Shape,
    converted: ConvertedType,
    dictionary: bool,
) -> Column {
    Column {
        path,
        physical,
        shape,
        converted,
        dictionary,
    }
}

/// Number of elements of the schema: the root, the leaves, and three groups of the list.
pub(super) const ELEMENTS: usize = COLUMNS + 4;

/// Number of leaf columns.
pub(super) const COLUMNS: usize = 12;

/// The leaf columns in the order of the file. `Data` of the writer and `Group` of the reader keep
/// this order.
pub(super) const LEAVES: [Column; COLUMNS] = {
    use ConvertedType::{UINT_8, UINT_16, UINT_32, UINT_64, UTF8};
    use Physical::{BYTE_ARRAY, INT32, INT64};
    use Shape::{Optional, Required, Segments};
    [
        column("time_ns", INT64, Required, UINT_64, false),
        column("event", BYTE_ARRAY, Required, UTF8, true),
        column("device", INT32, Optional, UINT_16, true),
        column("cpu", INT32, Optional, UINT_16, true),
        column("lines", INT32, Optional, UINT_16, true),
        column("mapping", INT32, Optional, UINT_32, false),
        column("direction", BYTE_ARRAY, Optional, UTF8, true),
        column("class", BYTE_ARRAY, Optional, UTF8, true),
        column("flags", INT32, Optional, UINT_8, true),
        column(
            "segments.list.element.phys_addr",
            INT64,
            Segments,
            UINT_64,
            true,
        ),
        column(
            "segments.list.element.bytes",
            INT64,
            Segments,
            UINT_64,
            true,
        ),
        column("text", BYTE_ARRAY, Optional, UTF8, true),
    ]
};

/// Builds the schema of the file.
pub(super) fn schema() -> Result<TypePtr, ParquetError> {
    let mut fields: Vec<TypePtr> = Vec::new();
    let mut element: Vec<TypePtr> = Vec::new();
    for leaf in &LEAVES {
        let name = leaf.path.rsplit('.').next().unwrap_or(leaf.path);
        let repetition = match leaf.shape {
            Shape::Optional => Repetition::OPTIONAL,
            Shape::Required | Shape::Segments => Repetition::REQUIRED,
        };
        let field = Type::primitive_type_builder(name, leaf.physical)
            .with_repetition(repetition)
            .with_converted_type(leaf.converted)
            .build()?;
        match leaf.shape {
            Shape::Segments => element.push(Arc::new(field)),
            Shape::Required | Shape::Optional => {
                // Insert the list at the position of its fields among the leaves.
                if !element.is_empty() {
                    fields.push(list(std::mem::take(&mut element))?);
                }
                fields.push(Arc::new(field));
            }
        }
    }
    let root = Type::group_type_builder("ringfence").with_fields(fields);
    Ok(Arc::new(root.build()?))
}

/// Builds a required list of required structs, in the three levels that the format prescribes.
fn list(fields: Vec<TypePtr>) -> Result<TypePtr, ParquetError> {
    let group = |name: &'static str, repetition, fields| {
        Type::group_type_builder(name)
            .with_repetition(repetition)
            .with_fields(fields)
    };
    let element = group("element", Repetition::REQUIRED, fields).build()?;
    let list = group("list", Repetition::REPEATED, vec![Arc::new(element)]).build()?;
    let segments = group("segments", Repetition::REQUIRED, vec![Arc::new(list)])
        .with_converted_type(ConvertedType::LIST)
        .build()?;
    Ok(Arc::new(segments))
}

/// Returns the settings for writing the columns.
pub(super) fn properties() -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_created_by(concat!("ringfence ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_offset_index_disabled(true)
        .set_dictionary_enabled(false);
    for leaf in &LEAVES {
        let path = ColumnPath::from(leaf.path.split('.').map(str::to_owned).collect::<Vec<_>>());
        // This encoding also applies after a dictionary has grown too large.
        if leaf.physical != Physical::BYTE_ARRAY {
            properties =
                properties.set_column_encoding(path.clone(), Encoding::DELTA_BINARY_PACKED);
        }
        properties = properties.set_column_dictionary_enabled(path, leaf.dictionary);
    }
    properties.build()
}
