//! libFuzzer entry point of [`ringfence_fuzz::vfio_user`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::vfio_user::run(data, &mut |_| {}));
