//! libFuzzer entry point of [`ringfence_fuzz::rtranslate`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::rtranslate::run(data, &mut |_| {}));
