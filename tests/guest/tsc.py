#!/usr/bin/env python3
"""Prints the kernel parameter that gives guests the frequency of the host's time stamp counter.

QEMU's emulator passes that counter on to guests. At boot, a guest compares the counter with a
timer. If a loaded host does not run the guest meanwhile, Linux measures a frequency that is too
low, for example by a factor of 26. The guest's clock is then too fast by this factor until Linux
corrects it, and time limits in the kernel expire.
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
    """Returns the counter and the time in ns at one moment, from the fastest of several reads."""
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
