//! libFuzzer entry point of [`ringfence_fuzz::replay`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::replay::run(data, &mut |_| {}));
