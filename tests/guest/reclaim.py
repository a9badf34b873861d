#!/usr/bin/env python3
"""Reclaims all reclaimable memory of a running guest, through the memory controller of its group.

    reclaim.py enter GROUP COMMAND...   creates the group, runs the command in it and removes it
    reclaim.py take GROUP FILE LOG N    waits until LOG contains "ready" and reclaims N times, more
                                        often while that helps; prints the resident pages of FILE
    reclaim.py join GROUP PID           creates the group and moves the process PID into it
    reclaim.py during GROUP FILE STOP   reclaims until the file STOP exists; prints how much of FILE
                                        is resident
    reclaim.py leave GROUP PID          moves PID and this process out of the group and removes it

GROUP is the name of a control group. FILE is the memory of the guest. N is at least 2. `take` and
`during` fail if fewer pages are resident than locked. `take` fails if the guest ends too early.
"""

import ctypes
import mmap
import os
import pathlib
import subprocess
import sys
import time

CGROUP = pathlib.Path("/sys/fs/cgroup")
MEMORY_V1 = CGROUP / "memory"
ENDED = "the guest ended before its memory was reclaimed"


def group_directory(name):
    """Returns the directory of a group, the file that starts a reclaim, and what to write to it."""
    lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    groups = dict(line.split(":", 2)[1:] for line in lines)
    if "memory" in groups and MEMORY_V1.is_dir():
        own = MEMORY_V1 / groups["memory"].lstrip("/")
        # After `join`, this process is in the group itself; otherwise it is in the parent group.
        return own if own.name == name else own / name, "memory.force_empty", "0"
    # In cgroup v2, the children of a group with processes have no memory controller. The root is
    # exempt.
    return CGROUP / name, "memory.reclaim", str(1 << 40)


def enter(name, command):
    directory, *_ = group_directory(name)
    directory.mkdir()
    try:
        join_group = lambda: (directory / "cgroup.procs").write_text(str(os.getpid()))
        return subprocess.run(command, preexec_fn=join_group, check=False).returncode
    finally:
        directory.rmdir()


def resident_pages(path):
    """Returns the number of pages of the file that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        anchor = ctypes.c_char.from_buffer(view)
        pages = (ctypes.c_ubyte * (len(view) // mmap.PAGESIZE))()
        address, length = ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(view))
        if libc.mincore(address, length, pages):
            raise OSError(ctypes.get_errno(), "mincore")
        del anchor
        return sum(page & 1 for page in pages)


def locked_pages(directory):
    """Returns the number of locked pages of each process of the group."""
    counts = []
    for process in (directory / "cgroup.procs").read_text().split():
        try:
            status = pathlib.Path(f"/proc/{process}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # The process has ended. Its pages are not locked any more.
        kib = sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmLck:"))
        counts.append(kib * 1024 // mmap.PAGESIZE)
    return counts


def reclaim(directory, control, request):
    """Asks the kernel to reclaim all memory of the group, and returns whether it could."""
    try:
        (directory / control).write_text(request)
    except FileNotFoundError:
        raise
    except OSError:
        # The kernel cannot reclaim locked pages, nor pages that were written in the meantime.
        return False
    return True


def still_helps(samples):
    """Returns whether the last reclaim removed more than a hundredth of the resident pages."""
    (before, _), (after, _) = samples[-2:]
    return after * 100 < before * 99


def sample_after_reclaim(name, path):
    """Reclaims once; returns the numbers of resident and locked pages, or None without a guest."""
    directory, control, request = group_directory(name)
    # The kernel reclaims only pages that the disk has too.
    with open(path, "r+b") as memory:
        os.fsync(memory.fileno())
    try:
        if not reclaim(directory, control, request):
            time.sleep(0.2)
        resident, locked = resident_pages(path), locked_pages(directory)
    except OSError:
        # `enter` removes the group when the guest has ended.
        if directory.is_dir():
            raise
        return None
    return (resident, sum(locked)) if locked else None


def take(name, path, log, times):
    directory, *_ = group_directory(name)
    # The group exists while the guest runs, and the guest's run time is limited.
    started = False
    while "ready" not in pathlib.Path(log).read_text(errors="replace"):
        exists = directory.is_dir()
        if started and not exists:
            sys.exit("the guest ended and was never ready")
        started |= exists
        time.sleep(0.1)
    before, samples = resident_pages(path), []
    while len(samples) < times or still_helps(samples) and len(samples) < 10 * times:
        sample = sample_after_reclaim(name, path)
        if sample is None:
            sys.exit(ENDED)
        samples.append(sample)
    print(f"resident pages: {before}; resident and locked pages after each reclaim: {samples}")
    if any(resident < locked for resident, locked in samples):
        sys.exit("a locked page is not resident")
    resident, locked = min(samples)
    # pviommu.sh reads this line.
    print(f"taken: {before} {resident} {locked}")


def join(name, process):
    directory, *_ = group_directory(name)
    directory.mkdir()
    (directory / "cgroup.procs").write_text(process)


def leave(name, process):
    directory, *_ = group_directory(name)
    for member in process, str(os.getpid()):
        (directory.parent / "cgroup.procs").write_text(member)
    directory.rmdir()


def during(name, path, stop):
    directory, control, request = group_directory(name)
    samples = []
    # At least one reclaim, even if STOP exists already.
    while not samples or not pathlib.Path(stop).exists():
        reclaim(directory, control, request)
        # During a hand-over, two daemons have locked the same pages.
        samples.append((resident_pages(path), max(locked_pages(directory), default=0)))
        time.sleep(0.1)
    if any(resident < locked for resident, locked in samples):
        sys.exit(f"a locked page is not resident; resident and locked pages: {samples}")
    resident, locked = min(samples)
    print(
        f"the host reclaimed memory {len(samples)} times: {resident // 256} MiB remained resident, "
        f"{locked} pages of them locked"
    )


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
