#!/usr/bin/env python3
"""Measures the memory and time that hostile traces cost, relative to their size.

    amplify.py RINGFENCE [--megabytes 1,10,100] [--case PATTERN] [--command NAME,...]
               [--seconds N] [--directory DIR]

For each format, kind of trace and size in 10^6 bytes, the script runs `trace info`, `size` and
`compare`. It prints a row: bytes of the file, peak memory, memory per byte of the file without 64
MiB for each pass, and CPU time. Exits with 1 if a run

- needs more memory than 100 bytes per byte of the file and 64 MiB for each pass,
- is killed by a signal, or
- takes more than N CPU seconds and 3 more for each MB and pass.

A run that refuses the trace with an error passes. But without --case, each command must complete
at least one trace of each format.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile

MIB = 1 << 20
RATIO = 100
BASE = 64 * MIB
# The number is that of passes in memory at the same time. `compare` of one mode has a measured pass
# and an attack pass. `size` has two rings with eight sizes each, and two modes with 15 geometries
# of the IOTLB.
COMMANDS = [
    ("info", ["trace", "info"], 1),
    ("strict", ["compare", "--repeat", "0", "--modes", "strict"], 2),
    ("rtc", ["compare", "--repeat", "0", "--modes", "pviommu+rtc-adaptive"], 2),
    ("size", ["size"], 46),
]


def line(what, t=0, cpu=0):
    return f"t-1 [{cpu:03}] ..... {t // 1000000}.{t % 1000000:06}: {what}\n"


def mapped(at, size=4096, device="0000:00:03.0"):
    fields = f"dma_addr={at:x} size={size} phys_addr={at:x} attrs="
    return f"dma_map_phys: {device} dir=TO_DEVICE {fields}"


def unmapped(at, size=4096, device="0000:00:03.0"):
    return f"dma_unmap_phys: {device} dir=TO_DEVICE dma_addr={at:x} size={size} attrs="


def alive():
    """Mappings of separate pages that are never unmapped."""
    n = 0
    while True:
        n += 1
        yield line(mapped((n << 12) % (60 << 30)), n)


def shared():
    """Mappings of the same page that are never unmapped."""
    n = 0
    while True:
        n += 1
        # The DMA addresses differ; the physical page is the same.
        what = f"dma_map_phys: d dir=TO_DEVICE dma_addr={n << 12:x} size=64 phys_addr=1000 attrs="
        yield line(what, n)


def reverse():
    """Blocks of 4096 mappings, unmapped youngest first, after one that is never unmapped."""
    yield line(mapped(0), 0)
    base, t = 1, 0
    while True:
        for n in range(base, base + 4096):
            t += 1
            yield line(mapped((n << 12) % (60 << 30)), t)
        for n in reversed(range(base, base + 4096)):
            t += 1
            yield line(unmapped((n << 12) % (60 << 30)), t)
        base += 4096


def stack():
    """Rounds of 60000 mappings, unmapped youngest first."""
    t = 0
    while True:
        for n in range(60000):
            t += 1
            yield line(mapped(n << 12), t)
        for n in reversed(range(60000)):
            t += 1
            yield line(unmapped(n << 12), t)


def gaps():
    """Hours between operations."""
    t = 0
    while True:
        t += 10**11
        yield line(mapped(4096), t)
        t += 10**11
        yield line(unmapped(4096), t)


def rests():
    """250 devices with a mapping each, then hours between the operations of one."""
    names = [f"0000:{n >> 8:02x}:{n >> 3 & 31:02x}.{n & 7}" for n in range(250)]
    for n, name in enumerate(names):
        yield line(mapped((n + 1) << 12, device=name), n)
    t = n = 0
    while True:
        t, n = t + 10**10, n + 1
        yield line(mapped((n + 2000 << 12) % (60 << 30), device=names[0]), t)


def holes():
    """Free single pages between mappings that stay, and mappings of two pages that do not fit."""
    n = t = 0
    while True:
        for at in range(n, n + 2000):
            yield line(mapped((at << 12) % (60 << 30)), t)
        for at in range(n, n + 2000, 2):
            yield line(unmapped((at << 12) % (60 << 30)), t + 1)
        n, t = n + 2000, t + 2
        for at in range(250):
            yield line(mapped((50 << 30) + (at << 13), 8192), t)
            yield line(unmapped((50 << 30) + (at << 13), 8192), t)


def large():
    """Mappings of 64 MiB, each unmapped at once."""
    n = 0
    while True:
        at = (n % 500) << 26
        yield line(mapped(at, 1 << 26), n)
        yield line(unmapped(at, 1 << 26), n)
        n += 1


def lists():
    """Scatterlists of many short segments."""
    n = 0
    while True:
        starts = [((n * 512 + i) << 13) % (60 << 30) for i in range(512)]
        text = ",".join(f"0x{start:x}" for start in starts)
        sizes = ",".join(["0x1"] * 512)
        what = (
            f"dma_map_sg: d dir=TO_DEVICE nents=512/512 ents=512/512 dma_addrs={{{text}}} "
            f"sizes={{{sizes}}} phys_addrs={{{text}}} attrs="
        )
        yield line(what, n)
        if n % 64 > 0:
            yield line(f"dma_unmap_sg: d dir=TO_DEVICE phys_addrs={{{text}}} attrs=", n)
        n += 1


def bursts():
    """Maps and unmaps of many devices and CPUs, all with the same time stamp."""
    n = 0
    while True:
        device, cpu = n % 250, (n // 250) % 512
        yield line(mapped(n << 12, 64, f"d{device}"), 0, cpu)
        yield line(unmapped(n << 12, 64, f"d{device}"), 0, cpu)
        n += 1


def accessed(at, size=64, device="0000:00:03.0", direction="TO_DEVICE"):
    return f"dma_access: {device} dir={direction} dma_addr={at:x} size={size}"


def accesses():
    """DMAs to each page of a mapping, and its unmap."""
    n = t = 0
    while True:
        at = (n << 18) % (60 << 30)
        yield line(mapped(at, 1 << 18), t)
        for page in range(64):
            t += 1
            yield line(accessed(at + (page << 12)), t)
        yield line(unmapped(at, 1 << 18), t)
        n += 1


def strays():
    """DMAs of many devices in both directions to unmapped addresses."""
    n = 0
    while True:
        n += 1
        direction = "FROM_DEVICE" if n % 2 else "TO_DEVICE"
        at = (n * 0x9E3779B97F4A7000) % 2**64
        yield line(accessed(at, 2**32 - 1, f"d{n % 250}", direction), n)


def marks():
    """Only short trace marks."""
    n = 0
    while True:
        n += 1
        yield line("tracing_mark_write: " + "m" * (n % 3), n)


def long_marks():
    """Only trace marks of 5000 bytes."""
    while True:
        yield line("tracing_mark_write: " + "m" * 5000)


def idle():
    """Copies of a line with an unrelated event."""
    while True:
        yield line("sched_switch: x")


CASES = [
    alive, shared, reverse, stack, gaps, rests, holes, large, lists, bursts, accesses, strays,
    marks, long_marks, idle,
]


def write_text(case, path, size):
    with open(path, "w") as out:
        for text in case():
            size -= len(text)
            if size < 0:
                return
            out.write(text)


def write_zstd(case, path, size):
    """Compresses text until the file has the size, at most 300 times as much text."""
    left = 300 * size
    with open(path, "wb") as out:
        pack = subprocess.Popen(["zstd", "-q", "-1", "-c"], stdin=subprocess.PIPE, stdout=out)
        block, held = [], 0
        for text in case():
            block.append(text)
            left -= len(text)
            held += len(text)
            # The peak of a child is at least the size of this process, which must stay small.
            if held > MIB or left < 0:
                held = 0
                pack.stdin.write("".join(block).encode())
                block = []
                if left < 0 or os.path.getsize(path) >= size:
                    break
        pack.stdin.close()
        pack.wait()


def write_parquet(binary, case, path, size):
    """Converts text; a file of Parquet has about a twentieth of its size."""
    text = path + ".text"
    write_text(case, text, 20 * size)
    command = [binary, "trace", "convert", text, "-o", path]
    limits = ["--max-segments", "1T", "--max-live", "1T", "--max-mapped", "1T"]
    done = subprocess.run(command + limits, capture_output=True, check=False)
    os.remove(text)
    return done.returncode == 0


def measure(command):
    """Returns peak memory in bytes, CPU seconds, exit status and the last line of the errors."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().split("\n")
    seconds = usage.ru_utime + usage.ru_stime
    return usage.ru_maxrss * 1024, seconds, child.returncode, lines[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary")
    parser.add_argument("--megabytes", default="1")
    parser.add_argument("--case", default="")
    parser.add_argument("--command", default=",".join(label for label, *_ in COMMANDS))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--directory")
    args = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="ringfence-amplify-", dir=args.directory)
    formats = ["text", "zstd", "parquet"]
    bad = 0
    outcomes = {}
    print("| format | trace | command | file, bytes | peak memory, MiB | bytes per byte "
          "| CPU time, s | outcome |")
    print("|---|---|---|---|---|---|---|---|")
    try:
        for megabytes in args.megabytes.split(","):
            size = int(float(megabytes) * 1e6)
            for case in CASES:
                for form in formats:
                    name = f"{form}-{case.__name__}"
                    if args.case not in name:
                        continue
                    # `trace convert` finds the format by the extension.
                    path = os.path.join(directory, f"{name}.{form}")
                    if form == "text":
                        write_text(case, path, size)
                    elif form == "zstd":
                        write_zstd(case, path, size)
                    elif not write_parquet(args.binary, case, path, size):
                        print(f"| {form} | {case.__name__} | cannot be written |", flush=True)
                        bad += 1
                        continue
                    held = os.path.getsize(path)
                    for label, command, passes in COMMANDS:
                        if label not in args.command.split(","):
                            continue
                        if (form, label) == ("parquet", "info"):
                            continue
                        peak, seconds, code, error = measure([args.binary] + command + [path])
                        ratio = max(0, peak / passes - BASE) / max(held, 1)
                        within = ratio <= RATIO and code in (0, 1)
                        within &= seconds <= args.seconds + 3 * size / 1e6 * passes
                        bad += not within
                        outcomes.setdefault((form, label), set()).add(code)
                        outcome = "done" if code == 0 else error.split(": ", 2)[-1]
                        outcome = outcome if within else "BEYOND: " + outcome
                        print(f"| {form} | {case.__name__} | {label} | {held} | {peak / MIB:.0f} "
                              f"| {ratio:.1f} | {seconds:.2f} | {outcome[:80]} |", flush=True)
                    os.remove(path)
    finally:
        shutil.rmtree(directory)
    for (form, label), codes in outcomes.items():
        if 0 not in codes and not args.case:
            print(f"`{label}` completes no trace of format {form}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
