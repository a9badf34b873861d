//! Parquet files that mislead the decoder: about the schema, the bytes of row groups, or pages.
#![cfg(feature = "parquet")]

use parquet::file::metadata::{
    ColumnChunkMetaData, ParquetMetaDataReader, ParquetMetaDataWriter, RowGroupMetaData,
};
use ringfence_trace::{
    Chunk, Operations, ParquetProblem, SAMPLE, TraceError, TraceOptions, TraceSource, write_parquet,
};

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

/// Writes the sample, and then its footer as `edit` changes its row group. `edit` may append to the
/// bytes before the footer.
fn edited(edit: impl FnOnce(&mut Vec<u8>, RowGroupMetaData) -> Vec<RowGroupMetaData>) -> Vec<u8> {
    let source = TraceSource::from_reader("sample", SAMPLE).unwrap();
    let mut operations = Operations::new("sample", source, TraceOptions::default());
    let mut bytes = Vec::new();
    write_parquet(&mut operations, &mut bytes).unwrap();
    let (rest, tail) = bytes.split_at(bytes.len() - 8);
    let length = u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]) as usize;
    let (body, footer) = rest.split_at(rest.len() - length);
    let metadata = ParquetMetaDataReader::decode_metadata(footer).unwrap();
    let mut bytes = body.to_vec();
    let mut metadata = metadata.into_builder();
    let [group] = metadata.take_row_groups().try_into().unwrap();
    let metadata = metadata.set_row_groups(edit(&mut bytes, group)).build();
    ParquetMetaDataWriter::new(&mut bytes, &metadata)
        .finish()
        .unwrap();
    bytes
}

/// Replaces the columns of a group.
fn with_columns(
    group: RowGroupMetaData,
    edit: impl FnMut((usize, ColumnChunkMetaData)) -> ColumnChunkMetaData,
) -> RowGroupMetaData {
    let columns = group.columns().to_vec().into_iter().enumerate();
    let columns = columns.map(edit).collect();
    let group = group.into_builder().set_column_metadata(columns);
    group.build().unwrap()
}

/// Writes the sample with other pages of its last column, which has one data page. `pages` gets
/// that page.
fn with_last_column(pages: impl FnOnce(&[u8]) -> Vec<u8>) -> Vec<u8> {
    edited(|bytes, group| {
        let last = group.num_columns() - 1;
        let (start, length) = group.column(last).byte_range();
        let page = &bytes[start as usize..][..length as usize];
        let (offset, pages) = (bytes.len() as i64, pages(page));
        bytes.extend(&pages);
        vec![with_columns(group, |(index, chunk)| {
            if index != last {
                return chunk;
            }
            let chunk = chunk.into_builder().set_dictionary_page_offset(None);
            let chunk = chunk.set_data_page_offset(offset);
            let chunk = chunk.set_total_compressed_size(pages.len() as i64);
            chunk.build().unwrap()
        })]
    })
}

#[test]
fn an_edited_file_is_read() {
    let sample = read(&edited(|_, group| vec![group])).unwrap();
    assert!(sample > 8000, "{sample}");
    assert_eq!(read(&with_last_column(<[u8]>::to_vec)), Ok(sample));
}

/// The time of a read would grow with the square of the file.
#[test]
fn row_groups_do_not_share_bytes() {
    let shared = edited(|_, group| vec![group.clone(), group.clone(), group]);
    let message = read(&shared).unwrap_err();
    assert!(message.contains("exceed the file"), "{message}");
    let columns = edited(|bytes, group| {
        let size = bytes.len() as i64 - 4;
        vec![with_columns(group, |(_, chunk)| {
            let chunk = chunk.into_builder().set_total_compressed_size(size);
            let chunk = chunk
                .set_dictionary_page_offset(None)
                .set_data_page_offset(4);
            chunk.build().unwrap()
        })]
    });
    let message = read(&columns).unwrap_err();
    assert!(message.contains("exceed the file"), "{message}");
}

/// The decoder would skip each of these headers at no cost of bytes.
#[test]
fn page_headers_cost_their_bytes() {
    let cases: [(&str, &[u8]); 3] = [
        // It begins with the sizes of a page; the decoder looks for the elements behind the end of
        // the file.
        (
            "2^31 doubles",
            &[0x15, 0, 0x15, 0, 0x15, 0, 0x69, 0xf7, 255, 255, 255, 255, 7],
        ),
        (
            "2^31 booleans",
            &[
                0x15, 0, 0x15, 0, 0x15, 0, 0x69, 0xf1, 255, 255, 255, 255, 7, 0,
            ],
        ),
        ("an index page", &[0x15, 2, 0x15, 0, 0x15, 0, 0]),
    ];
    for (name, header) in cases {
        let hostile = with_last_column(|page| [header, page].concat());
        let message = read(&hostile).unwrap_err();
        assert!(message.contains("page header"), "{name}: {message}");
    }
}
