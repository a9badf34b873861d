//! libFuzzer entry point of [`ringfence_fuzz::serve`].
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: ringfence_fuzz::serve::run_if_sandboxed(),
    |data: &[u8]| ringfence_fuzz::serve::run(data, &mut |_| {})
);
