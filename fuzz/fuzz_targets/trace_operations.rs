//! libFuzzer entry point of [`ringfence_fuzz::trace_operations`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::trace_operations::run(data, &mut |_| {}));
