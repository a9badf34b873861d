//! libFuzzer entry point of [`ringfence_fuzz::walk`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::walk::run(data, &mut |_| {}));
