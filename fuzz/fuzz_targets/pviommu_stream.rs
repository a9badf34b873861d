//! libFuzzer entry point of [`ringfence_fuzz::pviommu_stream`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::pviommu_stream::run(data, &mut |_| {}));
