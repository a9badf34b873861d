//! Checks the footer of a file before the decoder reads it. The decoder allocates the claimed size
//! of a list or a group and recurses for each nested group, so this module bounds both.
//!
//! The footer is a `FileMetaData` in the Thrift compact protocol (`parquet.thrift`,
//! `thrift-compact-protocol.md`).

use super::schema;
use crate::problem::ParquetProblem;

/// Maximum nesting depth of structs and lists. `FileMetaData` down to a column's statistics needs
/// 6.
const MAX_DEPTH: u32 = 16;
/// Fields of `FileMetaData` and `SchemaElement` with counts that the decoder trusts.
const SCHEMA: i64 = 2;
const ROW_GROUPS: i64 = 4;
const NUM_CHILDREN: i64 = 5;
/// Minimum number of bytes of a row group with its columns. This program writes more than 1000.
const GROUP_BYTES: usize = 128;

/// Types of the compact protocol.
mod kind {
    pub(super) const TRUE: u8 = 1;
    pub(super) const FALSE: u8 = 2;
    pub(super) const BYTE: u8 = 3;
    pub(super) const I16: u8 = 4;
    pub(super) const I32: u8 = 5;
    pub(super) const I64: u8 = 6;
    pub(super) const DOUBLE: u8 = 7;
    pub(super) const BINARY: u8 = 8;
    pub(super) const LIST: u8 = 9;
    pub(super) const SET: u8 = 10;
    pub(super) const STRUCT: u8 = 12;
}

/// Checks the counts of a footer.
pub(super) fn check(footer: &[u8]) -> Result<(), ParquetProblem> {
    let mut reader = Reader { rest: footer };
    let walked = reader.fields(0, &mut |reader, field, kind| {
        if field != SCHEMA && field != ROW_GROUPS || kind != kind::LIST {
            return reader.skip(kind, 1);
        }
        let (count, element) = reader.list()?;
        let most = match field {
            SCHEMA => schema::ELEMENTS,
            _ => footer.len() / GROUP_BYTES,
        };
        if count > most {
            return None;
        }
        for _ in 0..count {
            reader.schema_element(field == SCHEMA, element)?;
        }
        Some(())
    });
    walked.ok_or_else(|| ParquetProblem::Damaged {
        message: "the footer is truncated, or larger than that of a table of operations".to_owned(),
    })
}

/// Parses a footer from its start. Every method returns `None` for invalid bytes.
struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(byte)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn zigzag(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn take(&mut self, bytes: u64) -> Option<()> {
        self.rest = self.rest.get(usize::try_from(bytes).ok()?..)?;
        Some(())
    }

    /// Parses the header of a list: number of elements, and their type. Every element takes at
    /// least one byte.
    fn list(&mut self) -> Option<(usize, u8)> {
        let header = self.byte()?;
        let count = match header >> 4 {
            15 => usize::try_from(self.varint()?).ok()?,
            count => usize::from(count),
        };
        (count <= self.rest.len()).then_some((count, header & 0xf))
    }

    /// Parses the fields of a struct. `field` reads each of them and receives its number and type.
    fn fields(
        &mut self,
        depth: u32,
        field: &mut dyn FnMut(&mut Self, i64, u8) -> Option<()>,
    ) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        let mut number = 0_i64;
        loop {
            let header = self.byte()?;
            if header == 0 {
                return Some(());
            }
            number = match header >> 4 {
                0 => self.zigzag()?,
                delta => number.checked_add(i64::from(delta))?,
            };
            field(self, number, header & 0xf)?;
        }
    }

    /// Parses an element of the schema or a row group.
    fn schema_element(&mut self, is_schema: bool, element: u8) -> Option<()> {
        if element != kind::STRUCT {
            return None;
        }
        self.fields(1, &mut |reader, field, kind| {
            if is_schema && field == NUM_CHILDREN && kind == kind::I32 {
                let children = usize::try_from(reader.zigzag()?).ok()?;
                return (children <= schema::ELEMENTS).then_some(());
            }
            reader.skip(kind, 2)
        })
    }

    fn skip(&mut self, kind: u8, depth: u32) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        match kind {
            kind::TRUE | kind::FALSE => Some(()),
            kind::BYTE => self.take(1),
            kind::I16 | kind::I32 | kind::I64 => self.varint().map(drop),
            kind::DOUBLE => self.take(8),
            kind::BINARY => {
                let bytes = self.varint()?;
                self.take(bytes)
            }
            kind::LIST | kind::SET => {
                let (count, element) = self.list()?;
                for _ in 0..count {
                    // A boolean takes a byte in a list and no byte as a field.
                    match element {
                        kind::TRUE | kind::FALSE => self.take(1)?,
                        _ => self.skip(element, depth + 1)?,
                    }
                }
                Some(())
            }
            kind::STRUCT => self.fields(depth + 1, &mut |reader, _, kind| {
                reader.skip(kind, depth + 1)
            }),
            // `FileMetaData` has no maps.
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A footer whose schema has `elements` elements after its root, which claims `children`.
    fn footer(elements: u8, children: u8, groups: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x15, 2, 0x19, 0xfc, elements + 1];
        bytes.extend([0x48, 1, b'm', 0x15, children << 1, 0]);
        for _ in 0..elements {
            bytes.extend([0x35, 0, 0x18, 1, b'a', 0]);
        }
        bytes.extend([0x16, 0]);
        bytes.extend(groups);
        bytes.push(0);
        bytes
    }

    #[test]
    fn counts_that_the_decoder_believes_are_bounded() {
        let none: &[u8] = &[0x19, 0x0c];
        let cases: [(&str, Vec<u8>, bool); 7] = [
            ("sound", footer(15, 10, none), true),
            ("too many elements", footer(16, 10, none), false),
            ("too many children", footer(15, 17, none), false),
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
            ("cut", footer(15, 10, none)[..40].to_vec(), false),
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
}
