//! Links every core crate into a program without std and calls something in each. That it builds is
//! half of the check: had one of them pulled in std, there would be two panic handlers.
//!
//! Exits with 0, or with the number of the first part (counted from 1) that did not do its work.
#![no_std]
#![no_main]

extern crate alloc;

mod heap;
mod parts;
mod ram;

use core::ffi::{c_char, c_int};

#[global_allocator]
static HEAP: heap::Bump = heap::Bump::new();

// The host's C library brings the entry point that calls `main`.
#[link(name = "c")]
unsafe extern "C" {
    fn abort() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `abort` takes nothing, never returns and may be called at any time.
    unsafe { abort() }
}

/// The precompiled `core` names it; with `panic = "abort"` nothing calls it.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// Called by the C library's start-up code, on the only thread.
#[unsafe(no_mangle)]
extern "C" fn main(_argc: c_int, _argv: *const *const c_char) -> c_int {
    for (part, number) in parts::ALL.iter().zip(1..) {
        if part().is_none() {
            return number;
        }
    }
    0
}
