//! Parquet files that mislead the decoder about the schema.
#![cfg(feature = "parquet")]

use ringfence_trace::{Chunk, Operations, ParquetProblem, TraceError, TraceOptions};

/// Reads a file to its end. Returns the number of operations, or the message of a damaged file.
fn read(bytes: &[u8]) -> Result<usize, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hostile.parquet");
    std::fs::write(&path, bytes).unwrap();
    let mut chunk = Chunk::default();
    let mut seen = 0;
    let mut read = || {
        let mut operations = Operations::open(&path, TraceOptions::default())?;
        while operations.next_chunk(&mut chunk)? {
            seen += chunk.ops.len();
        }
        Ok(())
    };
    match read() {
        Ok(()) => Ok(seen),
        Err(TraceError::Parquet {
            problem: ParquetProblem::Damaged { message },
            ..
        }) => Err(message),
        Err(other) => panic!("{other}"),
    }
}

/// Surrounds a footer with the rest of an empty file.
fn file(footer: &[u8]) -> Vec<u8> {
    let length = u32::try_from(footer.len()).unwrap().to_le_bytes();
    [b"PAR1", footer, &length, b"PAR1"].concat()
}

/// Encodes a number as a varint.
fn varint(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// A list of `count` elements of a schema, each the only child of the one before.
fn nested(count: usize, name: usize) -> Vec<u8> {
    let name = [&varint(name)[..], &vec![b'n'; name]].concat();
    let element = [&[0x48][..], &name, &[0x15, 2, 0]].concat();
    [&[0xfc][..], &varint(count), &element.repeat(count)].concat()
}

/// A decoder that parses one of these schemas recurses for each element and overflows the stack,
/// which ends the process.
#[test]
fn a_schema_cannot_hide_from_the_check() {
    const DEEP: usize = 100_000;
    // A count that is also three booleans.
    const BOOLEANS: usize = 1 | 1 << 7 | 0x11 << 14;
    let list = nested(DEEP, 0);
    let booleans = varint(list.len() + 2);
    let cases = [
        ("a list", [&[0x29][..], &list, &[0]].concat()),
        (
            "in booleans of an unknown field",
            [&[0xa9, 0xf1][..], &booleans, &[9, 4], &list, &[0]].concat(),
        ),
        (
            "in fields after a boolean",
            [&[0x21][..], &nested(BOOLEANS, 0), &[0]].concat(),
        ),
        // The count is also the upper bits of the length of the bytes.
        (
            "in bytes",
            [&[0x28][..], &nested(DEEP, 123), &[0; 125]].concat(),
        ),
        (
            "behind an id of 17 bits",
            [&[9, 0x84, 0x80, 8][..], &list, &[0]].concat(),
        ),
    ];
    for (name, footer) in cases {
        let message = read(&file(&footer)).unwrap_err();
        assert!(message.contains("unknown fields"), "{name}: {message}");
    }
}
