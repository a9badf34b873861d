//! Files and compressed streams that cannot be read.

use ringfence_trace::{Chunk, Operations, TraceError, TraceOptions, TraceSource};

#[test]
fn a_cut_or_damaged_zstd_stream_is_an_error() {
    let sample = ringfence_trace::SAMPLE;
    let read = |bytes: &[u8]| -> Result<u64, TraceError> {
        let source = TraceSource::from_reader("z", std::io::Cursor::new(bytes.to_vec()))?;
        let mut operations = Operations::new("z", source, TraceOptions::default());
        let mut chunk = Chunk::default();
        while operations.next_chunk(&mut chunk)? {}
        Ok(operations.summary().events)
    };
    assert!(read(sample).expect("sound") > 10_000);
    for length in [5, 100, sample.len() / 2, sample.len() - 1] {
        let cut = read(&sample[..length]);
        assert!(
            matches!(cut, Err(TraceError::Compression { .. })),
            "{length}: {cut:?}"
        );
    }
    let mut damaged = sample.to_vec();
    for byte in &mut damaged[5000..5100] {
        *byte ^= 0x55;
    }
    assert!(read(&damaged).is_err());
    assert_eq!(read(b"").expect("empty"), 0);
}

#[test]
fn missing_file_is_reported() {
    let missing = Operations::open("no/such/trace".as_ref(), TraceOptions::default());
    assert!(matches!(missing, Err(TraceError::Io { line: 0, .. })));
}
