//! libFuzzer entry point of [`ringfence_fuzz::pviommu`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::pviommu::run(data, &mut |_| {}));
