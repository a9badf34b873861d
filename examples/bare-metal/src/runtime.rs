//! The functions that compiled Rust code calls: a heap, and those that the host's target leaves to
//! a C library. Rust's libraries for `x86_64-unknown-none` contain the latter.

use core::alloc::{GlobalAlloc, Layout};
use core::arch::global_asm;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const BYTES: usize = 1 << 20;

/// A heap that allocates from its start and never frees. A kernel has a better one.
#[repr(C, align(4096))]
struct Heap {
    bytes: UnsafeCell<[u8; BYTES]>,
    used: AtomicUsize,
}

#[global_allocator]
static HEAP: Heap = Heap {
    bytes: UnsafeCell::new([0; BYTES]),
    used: AtomicUsize::new(0),
};

// SAFETY: the program has one CPU and no interrupts. `alloc` gives each byte to one caller.
unsafe impl Sync for Heap {}

// SAFETY: `alloc` returns null or bytes of the heap that it never returned before, aligned because
// the heap and their offset are. No alignment of this program is larger than the heap's.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let start = self.used.load(Relaxed).next_multiple_of(layout.align());
        let end = start.saturating_add(layout.size());
        if end > BYTES {
            return core::ptr::null_mut();
        }
        self.used.store(end, Relaxed);
        // SAFETY: `start` lies in the heap, because `end` does.
        unsafe { self.bytes.get().cast::<u8>().add(start) }
    }

    unsafe fn dealloc(&self, _at: *mut u8, _layout: Layout) {}
}

global_asm!(
    r#"
    .global memcpy, memmove, memset, memcmp, bcmp, rust_eh_personality, _Unwind_Resume
memcpy:
memmove:
    mov rax, rdi
    mov rcx, rdx
    mov r8, rdi
    sub r8, rsi
    cmp r8, rdx
    jb 2f                               // the target begins inside the source
    rep movsb
    ret
2:
    lea rdi, [rdi + rdx - 1]
    lea rsi, [rsi + rdx - 1]
    std
    rep movsb
    cld
    ret
memset:
    mov r8, rdi
    mov eax, esi
    mov rcx, rdx
    rep stosb
    mov rax, r8
    ret
memcmp:
bcmp:
    mov rcx, rdx
    xor eax, eax
    repe cmpsb
    je 2f
    movzx eax, byte ptr [rdi - 1]
    movzx ecx, byte ptr [rsi - 1]
    sub eax, ecx
2:
    ret
rust_eh_personality:                    // a panic aborts, so nothing calls these two
_Unwind_Resume:
    ud2
    "#
);
