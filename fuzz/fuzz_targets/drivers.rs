//! libFuzzer entry point of [`ringfence_fuzz::drivers`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::drivers::run(data, &mut |_| {}));
