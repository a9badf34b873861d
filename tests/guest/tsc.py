#!/usr/bin/env python3
"""Prints the kernel parameter that gives guests the frequency of the host's time stamp counter.

QEMU's emulator passes that counter on to guests. A guest compares it with a timer at boot, and on
a loaded host, which does not run it in the meantime, Linux has taken a 26th of the frequency: the
guest's clock is then 26 times too fast until it notices, and time limits expire in its kernel.
Prints nothing on other architectures.
"""

import ctypes
import mmap
import platform
import time

# rdtsc; shl rdx, 32; or rax, rdx; ret
RDTSC = bytes.fromhex("0f3148c1e2204809d0c3")
READS = 100
SECONDS = 0.1


def pair(rdtsc):
    """Returns counter and nanoseconds of one moment: those that were read in the least time."""
    pairs = []
    for _ in range(READS):
        before = time.monotonic_ns()
        ticks = rdtsc()
        after = time.monotonic_ns()
        pairs.append((after - before, ticks, (before + after) // 2))
    return min(pairs)[1:]


if platform.machine() == "x86_64":
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(RDTSC)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)
    ticks, nanoseconds = pair(rdtsc)
    time.sleep(SECONDS)
    later_ticks, later = pair(rdtsc)
    print(f"tsc_early_khz={(later_ticks - ticks) * 1_000_000 // (later - nanoseconds)}")
