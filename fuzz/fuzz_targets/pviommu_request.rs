//! libFuzzer entry point of [`ringfence_fuzz::pviommu_request`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::pviommu_request::run(data, &mut |_| {}));
