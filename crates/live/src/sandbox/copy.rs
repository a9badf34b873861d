//! Copies to and from windows. The daemon may unmap a window at any moment, even during a copy.
//!
//! One assembly routine makes all copies. A page that is unmapped or not writable raises a signal
//! at one of its instructions. The handler recognises the instruction's address and resumes at the
//! routine's exit, which returns a number other than 0: the bytes not copied. Kernels copy from
//! user space the same way.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;

use crate::grants::sys;
use crate::grants::windows::{END, FIRST};

/// Assembles the routine, with the labels that the handler needs around the instructions.
macro_rules! copy_routine {
    ($($instruction:literal),* $(,)?) => {
        core::arch::global_asm!(
            ".pushsection .text.ringfence_copy, \"ax\", %progbits",
            ".p2align 4",
            ".hidden ringfence_copy",
            ".globl ringfence_copy",
            ".hidden ringfence_copy_out",
            ".globl ringfence_copy_out",
            ".hidden ringfence_copy_end",
            ".globl ringfence_copy_end",
            "ringfence_copy:",
            $($instruction,)*
            "ringfence_copy_end:",
            ".popsection",
        );
    };
}

// rdi: to, rsi: from, rdx: bytes. rcx: bytes left, at every instruction that can fault.
#[cfg(target_arch = "x86_64")]
copy_routine!(
    "mov rcx, rdx",
    // Copy ring fields of 2, 4 or 8 bytes with one load and one store.
    "cmp rdx, 8",
    "je 8f",
    "cmp rdx, 4",
    "je 4f",
    "cmp rdx, 2",
    "je 2f",
    "rep movsb",
    "ringfence_copy_out:",
    "mov rax, rcx",
    "ret",
    "8:",
    "mov rax, [rsi]",
    "mov [rdi], rax",
    "xor eax, eax",
    "ret",
    "4:",
    "mov eax, [rsi]",
    "mov [rdi], eax",
    "xor eax, eax",
    "ret",
    "2:",
    "movzx eax, word ptr [rsi]",
    "mov [rdi], ax",
    "xor eax, eax",
    "ret",
);

// x0: to, x1: from, x2: bytes. x3: bytes left, at every instruction that can fault; a step of 8
// bytes that faults counts as not copied.
#[cfg(target_arch = "aarch64")]
copy_routine!(
    "mov x3, x2",
    // Copy ring fields of 2, 4 or 8 bytes with one load and one store.
    "cmp x2, #8",
    "b.eq 8f",
    "cmp x2, #4",
    "b.eq 4f",
    "cmp x2, #2",
    "b.eq 2f",
    "1:",
    "cmp x3, #8",
    "b.lo 3f",
    "ldr x4, [x1]",
    "str x4, [x0]",
    "add x1, x1, #8",
    "add x0, x0, #8",
    "sub x3, x3, #8",
    "b 1b",
    "3:",
    "cbz x3, ringfence_copy_out",
    "ldrb w4, [x1]",
    "strb w4, [x0]",
    "add x1, x1, #1",
    "add x0, x0, #1",
    "sub x3, x3, #1",
    "b 3b",
    "ringfence_copy_out:",
    "mov x0, x3",
    "ret",
    "8:",
    "ldr x4, [x1]",
    "str x4, [x0]",
    "mov x0, #0",
    "ret",
    "4:",
    "ldr w4, [x1]",
    "str w4, [x0]",
    "mov x0, #0",
    "ret",
    "2:",
    "ldrh w4, [x1]",
    "strh w4, [x0]",
    "mov x0, #0",
    "ret",
);

// a0: to, a1: from, a2: bytes. a3: bytes left, at every instruction that can fault; a step of 8
// bytes that faults counts as not copied.
#[cfg(target_arch = "riscv64")]
copy_routine!(
    "mv a3, a2",
    // Copy ring fields of 2, 4 or 8 bytes with one load and one store. Linux emulates misaligned
    // accesses of user space if the CPU does not have them.
    "li a4, 2",
    "beq a2, a4, 2f",
    "li a4, 4",
    "beq a2, a4, 4f",
    "li a4, 8",
    "beq a2, a4, 8f",
    "or a5, a0, a1",
    "andi a5, a5, 7",
    "bnez a5, 3f",
    "1:",
    "bltu a3, a4, 3f",
    "ld a5, 0(a1)",
    "sd a5, 0(a0)",
    "addi a1, a1, 8",
    "addi a0, a0, 8",
    "addi a3, a3, -8",
    "j 1b",
    "3:",
    "beqz a3, ringfence_copy_out",
    "lbu a5, 0(a1)",
    "sb a5, 0(a0)",
    "addi a1, a1, 1",
    "addi a0, a0, 1",
    "addi a3, a3, -1",
    "j 3b",
    "ringfence_copy_out:",
    "mv a0, a3",
    "ret",
    "8:",
    "ld a5, 0(a1)",
    "sd a5, 0(a0)",
    "li a0, 0",
    "ret",
    "4:",
    "lw a5, 0(a1)",
    "sw a5, 0(a0)",
    "li a0, 0",
    "ret",
    "2:",
    "lhu a5, 0(a1)",
    "sh a5, 0(a0)",
    "li a0, 0",
    "ret",
);

unsafe extern "C" {
    fn ringfence_copy(to: *mut u8, from: *const u8, bytes: usize) -> usize;
    static ringfence_copy_out: u8;
    static ringfence_copy_end: u8;
}

/// The page is unmapped or lacks the permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFault;

/// Copies from the window address `from`. On an error some bytes of `to` may have been overwritten.
///
/// # Errors
/// [`CopyFault`] if part of the source is outside the windows, or unmapped.
pub fn read(from: u64, to: &mut [u8]) -> Result<(), CopyFault> {
    let source = checked_pointer(from, to.len())?;
    // SAFETY: the source lies within the window addresses, where only guest memory is ever mapped.
    // If it is unmapped, the handler ends the copy. The destination is `to`. Guest memory may
    // change during the copy; bytes have no invalid values.
    check_complete(unsafe { ringfence_copy(to.as_mut_ptr(), source, to.len()) })
}

/// Copies to the window address `to`. On an error some bytes may have been written.
///
/// # Errors
/// [`CopyFault`] if part of the destination is outside the windows, unmapped or not writable.
pub fn write(to: u64, from: &[u8]) -> Result<(), CopyFault> {
    let destination = checked_pointer(to, from.len())?;
    // SAFETY: as in `read`, with the window as the destination. No Rust object lies there.
    check_complete(unsafe { ringfence_copy(destination.cast_mut(), from.as_ptr(), from.len()) })
}

fn checked_pointer(at: u64, bytes: usize) -> Result<*const u8, CopyFault> {
    let bytes = u64::try_from(bytes).map_err(|_| CopyFault)?;
    let end = at.checked_add(bytes).ok_or(CopyFault)?;
    if at < FIRST || end > END {
        return Err(CopyFault);
    }
    let at = usize::try_from(at).map_err(|_| CopyFault)?;
    Ok(std::ptr::with_exposed_provenance(at))
}

fn check_complete(left: usize) -> Result<(), CopyFault> {
    if left == 0 { Ok(()) } else { Err(CopyFault) }
}

/// Installs the handler that turns faults of copies into [`CopyFault`], for all threads. Any other
/// fault ends the process.
///
/// # Errors
/// The error of sigaction(2).
pub fn catch_faults() -> io::Result<()> {
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
    // SAFETY: the structure consists of integers and a null pointer; zero is valid for all of them.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // An access beyond the end of the mapped file raises SIGBUS.
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: the handler accesses only its own arguments, so it may run at any instruction.
        if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

extern "C" fn on_fault(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let begin = ringfence_copy as *const () as usize;
    let (out, end) = (
        (&raw const ringfence_copy_out).addr(),
        (&raw const ringfence_copy_end).addr(),
    );
    // SAFETY: with `SA_SIGINFO` the third argument is the interrupted thread's context, which the
    // handler may change.
    let context = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext };
    let Some(at) = program_counter(context) else {
        sys::end(1);
    };
    if !(begin..end).contains(&(*at as usize)) {
        sys::end(1);
    }
    *at = out as Register;
}

/// The type of a register in a context.
#[cfg(target_arch = "x86_64")]
type Register = i64;
#[cfg(target_arch = "aarch64")]
type Register = u64;
#[cfg(target_arch = "riscv64")]
type Register = libc::c_ulong;

/// Returns the register that holds the address of the interrupted instruction.
fn program_counter(context: &mut libc::mcontext_t) -> Option<&mut Register> {
    #[cfg(target_arch = "x86_64")]
    return context.gregs.get_mut(libc::REG_RIP as usize);
    #[cfg(target_arch = "aarch64")]
    return Some(&mut context.pc);
    #[cfg(target_arch = "riscv64")]
    return context.__gregs.get_mut(libc::REG_PC);
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::grants::Call;
    use crate::grants::sys::make;
    use crate::grants::windows::GrantWindow;

    /// Unmaps the second of two pages and copies all sizes up to the boundary and across it.
    #[test]
    fn a_copy_ends_where_the_page_does() {
        catch_faults().unwrap();
        let fd = rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(8192).unwrap();
        let window = GrantWindow {
            start: FIRST + (1 << 30),
            bytes: 8192,
        };
        let both = ringfence_types::Permissions::READ_WRITE;
        // SAFETY: no other test uses this window.
        let made = unsafe { make(&Call::grant(window, file.as_raw_fd(), 0, both)) };
        assert_eq!(made, 0);
        let edge = window.start + 4096;
        for bytes in (1..=20).chain([100, 4096]) {
            let data: Vec<u8> = (0..bytes as u8).chain([7]).cycle().take(bytes).collect();
            let mut back = vec![0; bytes];
            assert_eq!(write(edge - 3, &data), Ok(()));
            assert_eq!(read(edge - 3, &mut back), Ok(()));
            assert_eq!(back, data, "{bytes}");
        }
        let second = GrantWindow {
            start: edge,
            bytes: 4096,
        };
        // SAFETY: as above.
        assert_eq!(unsafe { make(&Call::revoke(second)) }, 0);
        for bytes in (1..=20).chain([100, 4096]) {
            let mut data = vec![9; bytes];
            let before = edge - bytes as u64;
            assert_eq!(write(before, &data), Ok(()), "{bytes}");
            assert_eq!(read(before, &mut data), Ok(()), "{bytes}");
            assert_eq!(write(before + 1, &data), Err(CopyFault), "{bytes}");
            assert_eq!(read(before + 1, &mut data), Err(CopyFault), "{bytes}");
            assert_eq!(read(edge, &mut data), Err(CopyFault), "{bytes}");
        }
        let readable = ringfence_types::Permissions::READ;
        // SAFETY: as above.
        let made = unsafe { make(&Call::grant(second, file.as_raw_fd(), 0, readable)) };
        assert_eq!(made, 0);
        assert_eq!(read(edge, &mut [0; 9]), Ok(()));
        assert_eq!(write(edge, &[0; 9]), Err(CopyFault), "for reading only");
    }

    #[test]
    fn nothing_but_windows_is_reached() {
        let own = [0u8; 16];
        let at = own.as_ptr().addr() as u64;
        assert_eq!(write(at, &[1; 16]), Err(CopyFault));
        assert_eq!(read(END - 8, &mut [0; 16]), Err(CopyFault));
        assert_eq!(read(u64::MAX, &mut [0; 16]), Err(CopyFault));
        assert_eq!(own, [0; 16]);
    }
}
