//! libFuzzer entry point of [`ringfence_fuzz::translate`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::translate::run(data, &mut |_| {}));
