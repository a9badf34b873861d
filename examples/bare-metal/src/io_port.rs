//! The I/O ports of the CPU.

use core::arch::asm;
use core::fmt;

/// Data register of the first serial port. QEMU's needs no setup and takes a byte at any time.
const COM1: u16 = 0x3f8;
/// Port of QEMU's `isa-debug-exit`.
const DEBUG_EXIT: u16 = 0xf4;

/// Reads a 32-bit port.
pub(crate) fn read32(port: u16) -> u32 {
    let value;
    // SAFETY: no port that this program reads affects memory.
    unsafe { asm!("in eax, dx", out("eax") value, in("dx") port, options(nomem, nostack)) };
    value
}

/// Writes a 32-bit port.
pub(crate) fn write32(port: u16, value: u32) {
    // SAFETY: no port that this program writes affects its memory.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nostack)) };
}

/// The serial port as a console.
pub(crate) struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the serial port does not access memory.
            unsafe { asm!("out dx, al", in("dx") COM1, in("al") byte, options(nomem, nostack)) };
        }
        Ok(())
    }
}

/// Ends QEMU with the exit status `2 * code + 1`.
pub(crate) fn exit(code: u32) -> ! {
    write32(DEBUG_EXIT, code);
    loop {
        core::hint::spin_loop();
    }
}
