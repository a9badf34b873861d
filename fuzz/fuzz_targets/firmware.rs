//! libFuzzer entry point of [`ringfence_fuzz::firmware`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::firmware::run(data, &mut |_| {}));
