//! libFuzzer entry point of [`ringfence_fuzz::trace_text`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::trace_text::run(data, &mut |_| {}));
