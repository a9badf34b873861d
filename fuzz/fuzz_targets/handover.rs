//! libFuzzer entry point of [`ringfence_fuzz::handover`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::handover::run(data, &mut |_| {}));
