//! From QEMU's `-kernel` to Rust.
//!
//! QEMU enters the address in the ELF note in 32-bit protected mode, without paging, with the
//! address of a start info in EBX (the PVH boot protocol of Xen).

use core::arch::global_asm;

use crate::firmware;

global_asm!(
    r#"
    .section .note.pvh, "a", @note
    .balign 4
    .long 4, 8, 18                      // sizes of name and descriptor, XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long pvh_start, 0

    .section .text.boot, "ax"
    .code32
    .global pvh_start
pvh_start:
    cld
    mov eax, cr4
    or eax, 0x620                       // PAE; OSFXSR and OSXMMEXCPT, for SSE
    mov cr4, eax
    mov eax, offset level_4
    mov cr3, eax
    mov ecx, 0xc0000080                 // EFER
    rdmsr
    or eax, 0x100                       // LME
    wrmsr
    mov eax, cr0
    and eax, 0xfffffffb                 // not EM
    or eax, 0x80000002                  // PG, MP
    mov cr0, eax
    lgdt [descriptors]
    mov esp, offset stack_end
    mov eax, offset long_mode
    push 8
    push eax
    retf                                // to 8:long_mode
    .code64
long_mode:
    mov edi, ebx
    call start
    ud2

    .section .data.boot, "aw"
    .balign 8
code_segment:
    .quad 0, 0x00209a0000000000         // null, 64-bit code of ring 0
descriptors:
    .word 15
    .long code_segment

    // The first 4 GiB at their physical addresses, in pages of 2 MiB: present and writable (3), and
    // large (0x80). The MTRRs make the registers of devices uncached.
    .balign 4096
level_4:
    .quad level_3 + 3
    .fill 511, 8, 0
level_3:
    .quad level_2 + 0x0003, level_2 + 0x1003, level_2 + 0x2003, level_2 + 0x3003
    .fill 508, 8, 0
level_2:
    .set page, 0
    .rept 2048
    .quad page + 0x83
    .set page, page + 0x200000
    .endr

    .section .bss.boot, "aw", @nobits
    .balign 16
    .skip 0x20000
stack_end:
    .text
    "#
);

/// The start info (Xen, `hvm_start_info`, version 0).
#[repr(C)]
struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    module_list: u64,
    command_line: u64,
    rsdp: u64,
}

/// The page tables map the addresses below, each to itself.
pub(crate) const MAPPED_END: u64 = 1 << 32;

const MAGIC: u32 = 0x336e_c578;

/// The command line that makes the program forget invalidations.
const FORGET: &[u8] = b"forget-invalidations";

/// The entry in 64-bit mode, with interrupts disabled.
#[unsafe(no_mangle)]
extern "C" fn start(info: &StartInfo) -> ! {
    assert_eq!(info.magic, MAGIC, "not started by the PVH protocol");
    // SAFETY: the boot protocol provides both, and nothing writes there.
    let (rsdp, option) = unsafe {
        (
            firmware::bytes(info.rsdp, firmware::RSDP_BYTES),
            firmware::bytes(info.command_line, FORGET.len()),
        )
    };
    crate::main(rsdp.unwrap_or(&[]), option == Some(FORGET))
}
