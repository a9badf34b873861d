//! libFuzzer entry point of [`ringfence_fuzz::riommu`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::riommu::run(data, &mut |_| {}));
