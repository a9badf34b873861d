//! Links every core crate into a program without std and calls a function of each. The successful
//! build is half of the check: if a crate used std, the program would have two panic handlers.
//!
//! Exits with 0, or with the number (from 1) of the first part that failed.
#![no_std]
#![no_main]

extern crate alloc;

mod heap;
mod parts;
mod ram;

use core::ffi::{c_char, c_int};

#[global_allocator]
static HEAP: heap::Bump = heap::Bump::new();

// The host's C library has the entry point that calls `main`.
#[link(name = "c")]
unsafe extern "C" {
    fn abort() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: `abort` takes no arguments, never returns and may be called at any time.
    unsafe { abort() }
}

/// The precompiled `core` refers to it; with `panic = "abort"` nothing calls it.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// The C library's start-up code calls it, on the only thread.
#[unsafe(no_mangle)]
extern "C" fn main(_argc: c_int, _argv: *const *const c_char) -> c_int {
    for (part, number) in parts::ALL.iter().zip(1..) {
        if part().is_none() {
            return number;
        }
    }
    0
}
