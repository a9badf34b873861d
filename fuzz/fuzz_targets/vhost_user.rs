//! libFuzzer entry point of [`ringfence_fuzz::vhost_user`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_fuzz::vhost_user::run(data, &mut |_| {}));
