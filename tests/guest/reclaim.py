#!/usr/bin/env python3
"""The host takes memory of a running guest back: all that it can, by the memory controller of its control groups.

    tests/guest/reclaim.py enter GROUP COMMAND...   makes the group, runs the command in it, removes it
    tests/guest/reclaim.py take GROUP FILE LOG N    waits until LOG says "ready", then takes back N times; says what stayed of FILE

    tests/guest/reclaim.py join GROUP PID           makes the group, with this process in it
    tests/guest/reclaim.py during GROUP FILE STOP   takes back again and again until the file STOP is there; says what stayed of FILE
    tests/guest/reclaim.py leave GROUP PID          removes it; this process is the last in it

`take` and `during` fail if a locked page has left the memory. GROUP is a name.
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
        directory = first / groups["memory"].lstrip("/")
        # Or in it, if this process has joined it.
        return directory if directory.name == name else directory / name, "memory.force_empty", "0"
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
    """Pages that each process of the group has locked."""
    each = []
    for process in (directory / "cgroup.procs").read_text().split():
        try:
            status = pathlib.Path(f"/proc/{process}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has gone, and what it had locked is not.
        kib = sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmLck:"))
        each.append(kib * 1024 // mmap.PAGESIZE)
    return each


def gains(stayed):
    """Whether the last time took more than a hundredth of what had stayed."""
    (before, _), (after, _) = stayed[-2:]
    return after * 100 < before * 99


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
    while len(stayed) < times or gains(stayed) and len(stayed) < 10 * times:
        # Only what the disk has can be taken.
        with open(path, "r+b") as memory:
            os.fsync(memory.fileno())
        try:
            (directory / file).write_text(word)
        except OSError:
            # Less than all of it could be taken: what is locked, and what was written since.
            time.sleep(0.2)
        stayed.append((resident(path), sum(locked(directory))))
    print(f"resident before: {before}, then, of which locked: {stayed}")
    if any(there < kept for there, kept in stayed):
        sys.exit("a locked page has left the memory")
    there, kept = min(stayed)
    print(f"taken: {before} {there} {kept}")


def join(name, process):
    directory, *_ = group_directory(name)
    directory.mkdir()
    (directory / "cgroup.procs").write_text(process)


def leave(name, process):
    directory, *_ = group_directory(name)
    for mover in process, str(os.getpid()):
        (directory.parent / "cgroup.procs").write_text(mover)
    directory.rmdir()


def during(name, path, stop):
    directory, file, word = group_directory(name)
    found = []
    # Once at least, however soon it is over.
    while not found or not pathlib.Path(stop).exists():
        try:
            (directory / file).write_text(word)
        except OSError:
            pass  # As above.
        # Of two daemons each has locked the same.
        found.append((resident(path), max(locked(directory), default=0)))
        time.sleep(0.1)
    if any(there < kept for there, kept in found):
        sys.exit(f"a locked page has left the memory: {found}")
    there, kept = min(found)
    print(f"taken back {len(found)} times meanwhile: {there // 256} MiB stayed, {kept} pages of them locked")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["enter", name, *command]:
            sys.exit(enter(name, command))
        case ["take", name, path, log, times]:
            take(name, path, log, int(times))
        case ["join", name, process]:
            join(name, process)
        case ["during", name, path, stop]:
            during(name, path, stop)
        case ["leave", name, process]:
            leave(name, process)
        case _:
            sys.exit(__doc__)
