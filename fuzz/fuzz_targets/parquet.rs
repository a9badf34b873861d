//! libFuzzer entry point of [`ringfence_fuzz::parquet`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::parquet::run(data, &mut |_| {}));
