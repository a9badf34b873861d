//! Checks the footer of a file before the decoder reads it. The decoder allocates the claimed size
//! of a list or a group and recurses for each nested group, so this module bounds both.
//!
//! The footer is a `FileMetaData` of `parquet.thrift`. The tables below have its fields except
//! those of encryption and of geospatial columns, which no table of operations has.

use super::schema::{COLUMNS, ELEMENTS};
use super::thrift::Kind::{Binary, Bool, Count, I8, I16, I32, I64, Struct};
use super::thrift::{Fields, Kind, List, Reader};
use crate::problem::ParquetProblem;

/// Minimum number of bytes of a row group with its columns. This program writes more than 1000.
const GROUP_BYTES: usize = 128;
/// Maximum number of pairs of metadata. This program writes 3.
const PAIRS: usize = 1024;
/// Maximum number of elements of the small lists of a column: encodings, statistics of pages, and
/// histograms of levels.
const SMALL: usize = 64;

/// Checks the fields of a footer.
pub(super) fn check(footer: &[u8]) -> Result<(), ParquetProblem> {
    let walked = Reader::new(footer).value(&Struct(FILE));
    walked.ok_or_else(|| ParquetProblem::Damaged {
        message: "the footer is truncated, exceeds that of a table of operations, or has unknown \
            fields"
            .to_owned(),
    })
}

const fn list(element: &'static Kind, most: usize) -> Kind {
    let bytes = 1;
    Kind::List(List {
        element,
        most,
        bytes,
    })
}

static EMPTY: &Fields = &[];

// `FileMetaData` of `parquet.thrift`.
static FILE: &Fields = &[
    (1, I32),
    (2, list(&Struct(ELEMENT), ELEMENTS)),
    (3, I64),
    (
        4,
        Kind::List(List {
            element: &Struct(GROUP),
            most: usize::MAX,
            bytes: GROUP_BYTES,
        }),
    ),
    (5, list(&Struct(PAIR), PAIRS)),
    (6, Binary),
    (7, list(&Struct(ORDER), COLUMNS)),
];

// `SchemaElement`. Field 5 is the number of children.
static ELEMENT: &Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, Binary),
    (5, Count(ELEMENTS as i32)),
    (6, I32),
    (7, I32),
    (8, I32),
    (9, I32),
    (10, Struct(LOGICAL_TYPE)),
];

// `LogicalType`: string, map, list, enum, decimal, date, time, time stamp, integer, null, JSON,
// BSON, UUID, 16-bit float.
static LOGICAL_TYPE: &Fields = &[
    (1, Struct(EMPTY)),
    (2, Struct(EMPTY)),
    (3, Struct(EMPTY)),
    (4, Struct(EMPTY)),
    (5, Struct(&[(1, I32), (2, I32)])),
    (6, Struct(EMPTY)),
    (7, Struct(TIME)),
    (8, Struct(TIME)),
    (10, Struct(&[(1, I8), (2, Bool)])),
    (11, Struct(EMPTY)),
    (12, Struct(EMPTY)),
    (13, Struct(EMPTY)),
    (14, Struct(EMPTY)),
    (15, Struct(EMPTY)),
];

// `TimeType` and `TimestampType` of `parquet.thrift`.
static TIME: &Fields = &[(1, Bool), (2, Struct(UNIT))];

// `TimeUnit` of `parquet.thrift`.
static UNIT: &Fields = &[(1, Struct(EMPTY)), (2, Struct(EMPTY)), (3, Struct(EMPTY))];

// `RowGroup` of `parquet.thrift`.
static GROUP: &Fields = &[
    (1, list(&Struct(CHUNK), COLUMNS)),
    (2, I64),
    (3, I64),
    (4, list(&Struct(&[(1, I32), (2, Bool), (3, Bool)]), COLUMNS)),
    (5, I64),
    (6, I64),
    (7, I16),
];

// `ColumnChunk` of `parquet.thrift`.
static CHUNK: &Fields = &[
    (1, Binary),
    (2, I64),
    (3, Struct(COLUMN)),
    (4, I64),
    (5, I32),
    (6, I64),
    (7, I32),
];

// `ColumnMetaData` of `parquet.thrift`.
static COLUMN: &Fields = &[
    (1, I32),
    (2, list(&I32, SMALL)),
    (3, list(&Binary, ELEMENTS)),
    (4, I32),
    (5, I64),
    (6, I64),
    (7, I64),
    (8, list(&Struct(PAIR), PAIRS)),
    (9, I64),
    (10, I64),
    (11, I64),
    (12, Struct(STATISTICS)),
    (13, list(&Struct(&[(1, I32), (2, I32), (3, I32)]), SMALL)),
    (14, I64),
    (15, I32),
    (16, Struct(SIZES)),
];

// `Statistics` of a column or a page.
pub(super) static STATISTICS: &Fields = &[
    (1, Binary),
    (2, Binary),
    (3, I64),
    (4, I64),
    (5, Binary),
    (6, Binary),
    (7, Bool),
    (8, Bool),
    (9, I64),
];

// `SizeStatistics` of `parquet.thrift`.
static SIZES: &Fields = &[(1, I64), (2, list(&I64, SMALL)), (3, list(&I64, SMALL))];

// `KeyValue` of `parquet.thrift`.
static PAIR: &Fields = &[(1, Binary), (2, Binary)];

// `ColumnOrder` of `parquet.thrift`.
static ORDER: &Fields = &[(1, Struct(EMPTY)), (2, Struct(EMPTY)), (3, Struct(EMPTY))];

#[cfg(test)]
mod tests {
    use super::*;

    /// A footer whose schema has `elements` elements after its root, which claims `children`.
    fn footer(elements: u8, children: u8, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x15, 2, 0x19, 0xfc, elements + 1];
        bytes.extend([0x48, 1, b'm', 0x15, children << 1, 0]);
        for _ in 0..elements {
            bytes.extend([0x35, 0, 0x18, 1, b'a', 0]);
        }
        bytes.extend([0x16, 0]);
        bytes.extend(rest);
        bytes.push(0);
        bytes
    }

    const NONE: &[u8] = &[0x19, 0x0c];

    #[test]
    fn counts_that_the_decoder_believes_are_bounded() {
        let cases: [(&str, Vec<u8>, bool); 8] = [
            ("sound", footer(15, 10, NONE), true),
            ("too many elements", footer(16, 10, NONE), false),
            ("too many children", footer(15, 17, NONE), false),
            (
                "fewer than no children",
                footer(15, 0x80 >> 1 | 1, NONE),
                false,
            ),
            (
                "more groups than bytes allow",
                footer(15, 10, &[0x19, 0x2c, 0, 0]),
                false,
            ),
            (
                "more groups than bytes",
                footer(15, 10, &[0x19, 0xfc, 0xff, 0xff, 3]),
                false,
            ),
            ("cut", footer(15, 10, NONE)[..40].to_vec(), false),
            // Field 9: a list of lists.
            (
                "deep",
                footer(15, 10, &[&[0x79][..], &[0x19; 100], &[0x00]].concat()),
                false,
            ),
        ];
        for (name, bytes, sound) in cases {
            assert_eq!(check(&bytes).is_ok(), sound, "{name}");
        }
    }

    #[test]
    fn only_fields_that_have_one_reading_pass() {
        let with = |rest: &[u8]| footer(15, 10, &[NONE, rest].concat());
        let cases: [(&str, Vec<u8>, bool); 12] = [
            (
                "a pair",
                with(&[0x19, 0x1c, 0x18, 1, b'k', 0x18, 0, 0]),
                true,
            ),
            ("an untyped empty list", with(&[0x19, 0]), true),
            ("the long form of an id", with(&[0x08, 12, 1, b'c']), true),
            ("a list of booleans", with(&[0x69, 0xf1, 1, 1]), false),
            ("a list of booleans as pairs", with(&[0x19, 0x11, 1]), false),
            ("an unknown field", with(&[0x65, 0]), false),
            ("a repeated field", with(&[0x09, 8, 0x0c]), false),
            (
                "an id beyond 16 bits",
                with(&[0x08, 0x8c, 0x80, 8, 1, b'c']),
                false,
            ),
            (
                "an id before the last",
                with(&[0x08, 12, 1, b'c', 0x09, 10, 0x0c]),
                false,
            ),
            ("a schema of booleans", vec![0x15, 2, 0x11, 0, 0], false),
            ("a schema of bytes", vec![0x15, 2, 0x18, 0, 0], false),
            (
                "a number beyond its type",
                vec![0x15, 0x80, 0x80, 0x80, 0x80, 0x10, 0],
                false,
            ),
        ];
        for (name, bytes, sound) in cases {
            assert_eq!(check(&bytes).is_ok(), sound, "{name}");
        }
    }
}
