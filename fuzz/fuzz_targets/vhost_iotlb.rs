//! libFuzzer entry point of [`ringfence_fuzz::vhost_iotlb`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::vhost_iotlb::run(data, &mut |_| {}));
