#!/usr/bin/env python3
"""The host takes memory of a running guest back: all that it can, by the memory controller of its control groups.

    tests/guest/reclaim.py enter GROUP COMMAND...   makes the group, runs the command in it, removes it
    tests/guest/reclaim.py take GROUP FILE LOG N    waits until LOG says "ready", then takes back N times; says what stayed of FILE

`take` fails if a locked page has left the memory. GROUP is a name.
"""

import ctypes
import mmap
import os
import pathlib
import subprocess
import sys
import time


def group_directory(name):
    """Below the group that this process is in; and the file that takes memory back, with what to write there."""
    groups = dict(line.split(":", 2)[1:] for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines())
    first = pathlib.Path("/sys/fs/cgroup/memory")
    if "memory" in groups and first.is_dir():
        return first / groups["memory"].lstrip("/") / name, "memory.force_empty", "0"
    # Of the second version, the first group that may have others with the memory controller.
    return pathlib.Path("/sys/fs/cgroup") / name, "memory.reclaim", str(1 << 40)


def enter(name, command):
    directory, *_ = group_directory(name)
    directory.mkdir()
    try:
        join = lambda: (directory / "cgroup.procs").write_text(str(os.getpid()))
        return subprocess.run(command, preexec_fn=join, check=False).returncode
    finally:
        directory.rmdir()


def resident(path):
    """Which pages of the file are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        anchor = ctypes.c_char.from_buffer(view)
        pages = (ctypes.c_ubyte * (len(view) // mmap.PAGESIZE))()
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(view)), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        del anchor
        return sum(page & 1 for page in pages)


def locked(directory):
    """Pages that the processes of the group have locked."""
    total = 0
    for process in (directory / "cgroup.procs").read_text().split():
        status = pathlib.Path(f"/proc/{process}/status").read_text()
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmLck:"))
    return total * 1024 // mmap.PAGESIZE


def take(name, path, log, times):
    directory, file, word = group_directory(name)
    # The group is there as long as the guest lives, which is limited.
    begun = False
    while "ready" not in pathlib.Path(log).read_text(errors="replace"):
        there = directory.is_dir()
        if begun and not there:
            sys.exit("the guest has ended and was never ready")
        begun |= there
        time.sleep(0.1)
    before, stayed = resident(path), []
    for _ in range(times):
        try:
            (directory / file).write_text(word)
        except OSError:
            pass  # Less than all of it could be taken, which is what is looked at.
        stayed.append((resident(path), locked(directory)))
    print(f"resident before: {before}, then, of which locked: {stayed}")
    if any(there < kept for there, kept in stayed):
        sys.exit("a locked page has left the memory")
    there, kept = min(stayed)
    print(f"taken: {before} {there} {kept}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["enter", name, *command]:
            sys.exit(enter(name, command))
        case ["take", name, path, log, times]:
            take(name, path, log, int(times))
        case _:
            sys.exit(__doc__)
