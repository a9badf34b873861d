//! libFuzzer entry point of [`ringfence_fuzz::virtio_iommu`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::virtio_iommu::run(data, &mut |_| {}));
