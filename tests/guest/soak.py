#!/usr/bin/env python3
"""Attacks the daemons of a working guest with hostile clients, and measures the guest.

    soak.py --seconds N --guest DIR:PID [--other DIR:PID] [--peer SOCKET]

DIR is the directory of a running `ringfence serve`, PID its process. The guest of --guest uses
blk.sock and iommu.sock. The attackers use every other socket of both directories, and also connect
to these two.

Phases without (A) and with (B) attackers follow in the order A B B A, so drift of the host cancels
within four phases: their ratio is one sample. metrics.sock has the guest's throughput. After each
group of four phases, the script reads the memory, descriptors and threads of every daemon. It fails
if the median ratio of throughput under attack to throughput alone is below 0.9, if an attacker sent
nothing, or if a daemon grew. If the ratio is too low, or an attacker has sent nothing, the phases
continue for up to six times N seconds: on a busy host, few samples are not enough.
"""

import argparse
import array
import dataclasses
import multiprocessing
import os
import pathlib
import random
import socket
import statistics
import struct
import sys
import time

# A phase is long enough for a few hundred requests of a guest without KVM.
PHASE_SECONDS = 1.5
# Attackers start or stop within this time, and the daemon completes what it had begun.
SETTLE_SECONDS = 0.5
# Maximum time until a daemon has closed the connections of attackers that have ended.
SETTLE_LIMIT_SECONDS = 60
LEAST_RATIO = 0.9
MOST_TIMES = 6
# Allocators keep some freed memory. A leak of one page per connection would be far above this.
GROWTH_BYTES = 16 << 20
SEED = 20261122


@dataclasses.dataclass
class Daemon:
    """A running `ringfence serve`."""

    directory: pathlib.Path
    pid: int

    @classmethod
    def parse(cls, text):
        directory, pid = text.rsplit(":", 1)
        return cls(pathlib.Path(directory), int(pid))

    def usage(self):
        """Returns the numbers of resident bytes, descriptors and threads."""
        with open(f"/proc/{self.pid}/status") as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        count = lambda directory: len(os.listdir(f"/proc/{self.pid}/{directory}"))
        return resident * 1024, count("fd"), count("task")


def connect(path, timeout=0.3):
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(timeout)
    stream.connect(str(path))
    return stream


def requests(daemon):
    """Returns the number of requests that the guest's disk has completed, from metrics.sock."""
    with connect(daemon.directory / "metrics.sock", 20) as stream:
        text = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
    names = ('ringfence_requests_total{device="blk"} ', 'ringfence_requests_total{device="disk"} ')
    return next(int(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


class Hostile:
    """Random values, mostly at the limits of a field."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.files = [os.memfd_create("soak", os.MFD_ALLOW_SEALING) for _ in range(4)]
        for file, size in zip(self.files, (0, 4096, 1 << 20, 1 << 24)):
            os.ftruncate(file, size)
        self.files += [os.eventfd(0), os.open("/dev/null", os.O_RDWR)]

    def u64(self):
        edges = (0, 1, 0xFFF, 0x1000, 1 << 32, 1 << 39, (1 << 48) - 4096, 1 << 63, (1 << 64) - 1)
        return self.random.choice(
            (*edges, self.random.getrandbits(64), self.random.getrandbits(20))
        )

    def u32(self):
        edges = (*range(10), 16, 32, 0x7FFFFFFF, 0xFFFFFFFF)
        return self.random.choice((*edges, self.random.getrandbits(32), self.random.getrandbits(8)))

    def some(self, most):
        return self.random.randbytes(self.random.randrange(most))

    def descriptors(self, most):
        files = self.random.choices(self.files, k=self.random.choice((0, 0, 1, 1, 2, most)))
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []


VFIO_VERSION = b'{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576}}\0'


def vfio_message(hostile, number):
    """Returns a vfio-user message: a header of 16 bytes, and a body of mostly valid length."""
    choose, u32, u64 = hostile.random.choice, hostile.u32, hostile.u64
    command = choose((1, 2, 2, 2, 3, 4, 5, 7, 8, 8, 9, 9, 9, 10, 10, 10, 13, 15, u32() & 0xFFFF))
    if command == 2:
        body = struct.pack(
            "<IIQQQ", choose((32, u32())), choose((0, 1, 2, 3, u32())), u64(), u64(), u64()
        )
    elif command == 3:
        body = struct.pack("<IIQQ", choose((24, u32())), choose((0, 1, 2)), u64(), u64())
    elif command == 8:
        body = struct.pack("<IIIII", choose((20, 24)), u32(), u32(), u32(), u32()) + hostile.some(
            64
        )
    elif command in (9, 10):
        length = choose((0, 1, 2, 4, 8, 64, 4096, u32()))
        body = struct.pack("<QII", choose((u64(), u32() & 0x3FFF)), choose((0, 7, u32())), length)
        body += hostile.random.randbytes(min(length, 64)) if command == 10 else b""
    else:
        body = hostile.some(200)
    size = len(body) + 16 if hostile.random.random() < 0.95 else u32()
    return (
        struct.pack("<HHIII", number & 0xFFFF, command, size, choose((0, 0, 1, 16, u32())), 0)
        + body
    )


def vhost_message(hostile, _):
    """Returns a vhost-user message: a header of 12 bytes, and a body of mostly valid length."""
    choose, u32, u64 = hostile.random.choice, hostile.u32, hostile.u64
    request = choose((1, 2, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 22, hostile.u32() & 63))
    if request == 5:
        regions = choose((0, 1, 2, 8, 9))
        body = struct.pack("<II", choose((regions, u32())), 0)
        body += b"".join(struct.pack("<QQQQ", u64(), u64(), u64(), u64()) for _ in range(regions))
    elif request in (2, 16):
        body = struct.pack("<Q", choose((0, 0x140000000, (1 << 64) - 1, u64())))
    elif request in (8, 10, 18):
        body = struct.pack("<II", choose((0, 1, u32())), u32())
    elif request == 9:
        body = struct.pack(
            "<IIQQQQ", choose((0, u32())), choose((0, 1)), u64(), u64(), u64(), u64()
        )
    elif request in (12, 13, 14):
        body = struct.pack("<Q", choose((0, 1, 0x100, u64())))
    elif request == 22:
        body = struct.pack(
            "<QQQBB6x", u64(), u64(), u64(), choose((0, 1, 2, 3, 7)), choose((1, 2, 3, 255))
        )
    else:
        body = hostile.some(200)
    size = len(body) if hostile.random.random() < 0.95 else u32()
    return struct.pack("<III", request, choose((1, 9, 0, 5)), size) + body


def converse(hostile, path, on, done, message, hello):
    """Sends a greeting and messages on one connection until the daemon closes it."""
    with connect(path) as stream:
        if hello and hostile.random.random() < 0.95:
            body = struct.pack("<HH", 0, 1) + VFIO_VERSION
            stream.send(struct.pack("<HHIII", 0, 1, len(body) + 16, 0, 0) + body)
        for number in range(hostile.random.choice((1, 5, 30, 100))):
            if not on.is_set():
                break
            stream.sendmsg([message(hostile, number)], hostile.descriptors(8))
            done.value += 1
            if hostile.random.random() < 0.7:
                stream.settimeout(0.05)
                try:
                    stream.recv(65536)
                except TimeoutError:
                    pass


def speak(message, hello):
    return lambda *arguments: converse(*arguments, message, hello)


def crowd(hostile, path, on, done):
    """Opens many connections that send nothing or a part of a message, and never read."""
    streams = []
    try:
        for _ in range(64):
            streams.append(connect(path, 0.05))
            done.value += 1
            if hostile.random.random() < 0.5:
                streams[-1].send(hostile.some(24))
        time.sleep(0.1)
    finally:
        for stream in streams:
            stream.close()
        time.sleep(0.5)


def trickle(hostile, path, on, done):
    """Sends a message slowly, one byte at a time."""
    with connect(path) as stream:
        for byte in vfio_message(hostile, 0):
            if not on.is_set():
                break
            stream.send(bytes([byte]))
            done.value += 1
            time.sleep(0.02)
    time.sleep(0.2)


def garbage(hostile, path, on, done):
    """Sends frames with wrong lengths as a network peer, and never reads."""
    with connect(path) as stream:
        while on.is_set():
            length = hostile.random.choice((64, 1514, 0, hostile.u32()))
            stream.sendall(struct.pack(">I", length) + hostile.some(1600))
            done.value += 1


def attack(name, act, path, seed, on, over, done):
    """Runs an attacker in its process.

    The attacker runs only on an idle CPU. The attack then costs the guest the work of the daemon,
    but not the CPU time of the attacker, which the host has to limit.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    pin(-1)
    hostile = Hostile(seed)
    while not over.is_set():
        if not on.wait(0.1):
            continue
        try:
            act(hostile, path, on, done)
        except (OSError, ValueError):
            # The daemon may close or refuse a connection, and its queue of connections may be full.
            time.sleep(0.01)


def pin(index):
    """Pins this process to the first (0) or last (-1) CPU if there are several."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        os.sched_setaffinity(0, {cpus[index]})


def attackers(guest, others, peer):
    """Returns name, function and socket of each attacker."""
    vfio, vhost = speak(vfio_message, True), speak(vhost_message, False)
    control = [path for path in (guest.directory / "control.sock",) if path.exists()]
    out = [(f"vfio-user on {path.stem}", vfio, path) for path in free_sockets(guest)]
    out += [
        (f"crowd on {path.stem}", crowd, path) for path in sorted(guest.directory.glob("*.sock"))
    ]
    out += [
        (f"vfio-user on {path.stem}, in use", vfio, guest.directory / path)
        for path in map(pathlib.Path, ("blk.sock", "iommu.sock", "pviommu.sock"))
        if (guest.directory / path).exists()
    ]
    out += [(f"trickle on {path.stem}", trickle, path) for path in [*free_sockets(guest), *control]]
    out += [(f"any bytes on {path.stem}", vfio, path) for path in control]
    for other in others:
        out += [
            ("vhost-user", vhost, other.directory / "blk.sock"),
            ("crowd, vhost-user", crowd, other.directory / "blk.sock"),
        ]
    if peer:
        out.append(("network peer", garbage, peer))
    return out


def free_sockets(daemon):
    used = ("blk", "iommu", "pviommu", "control", "metrics")
    return [path for path in sorted(daemon.directory.glob("*.sock")) if path.stem not in used]


def measure(guest, seconds):
    """Returns the requests per second of the guest's disk."""
    first, begun = requests(guest), time.monotonic()
    time.sleep(seconds)
    last, ended = requests(guest), time.monotonic()
    return (last - first) / (ended - begun)


def spread(values):
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return f"{statistics.median(ordered):.0f} ({ordered[tenth]:.0f} to {ordered[-1 - tenth]:.0f})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--guest", type=Daemon.parse, required=True)
    parser.add_argument("--other", type=Daemon.parse, action="append", default=[])
    parser.add_argument("--peer", type=pathlib.Path)
    args = parser.parse_args()
    on, over = multiprocessing.Event(), multiprocessing.Event()
    crew = []
    for number, (name, act, path) in enumerate(attackers(args.guest, args.other, args.peer)):
        done = multiprocessing.Value("Q", 0, lock=False)
        process = multiprocessing.Process(
            target=attack, args=(name, act, path, SEED + number, on, over, done), daemon=True
        )
        process.start()
        crew.append((name, process, done))
    daemons = [args.guest, *args.other]
    rates, usage = {False: [], True: []}, {daemon.pid: [] for daemon in daemons}
    begun, phase = time.monotonic(), 0
    idle = lambda: not all(done.value for _, _, done in crew)
    while phase % 4 or time.monotonic() - begun < args.seconds * (
        MOST_TIMES if rates[True] and (ratio_of(rates) < LEAST_RATIO or idle()) else 1
    ):
        attacked = phase % 4 in (1, 2)
        on.set() if attacked else on.clear()
        time.sleep(SETTLE_SECONDS)
        rates[attacked].append(measure(args.guest, PHASE_SECONDS))
        if phase % 4 == 3:
            for daemon in daemons:
                usage[daemon.pid].append(daemon.usage())
        phase += 1
    over.set()
    on.clear()
    for _, process, _ in crew:
        process.join(10)
        process.kill()
        process.join()
    for daemon in daemons:
        usage[daemon.pid].append(settled(daemon, usage[daemon.pid][0]))
    problems = report(crew, rates, usage)
    for problem in problems:
        print(f"FAIL {problem}")
    sys.exit(bool(problems))


def settled(daemon, first):
    """Returns the usage of a daemon after it has closed the connections of the attackers."""
    begun = time.monotonic()
    while True:
        last = daemon.usage()
        closed = all(now <= before for now, before in zip(last[1:], first[1:]))
        if closed or time.monotonic() - begun > SETTLE_LIMIT_SECONDS:
            return last
        time.sleep(0.1)


def ratio_of(rates):
    """Returns the median of the samples: throughput under attack to throughput alone."""
    groups = [
        sum(pair) / max(sum(alone), 1e-9)
        for pair, alone in zip(pairs(rates[True]), pairs(rates[False]))
    ]
    return statistics.median(groups)


def pairs(values):
    return zip(values[::2], values[1::2])


def report(crew, rates, usage):
    problems = []
    for name, _, done in crew:
        print(f"attacker: {name}: {done.value}")
        if not done.value:
            problems.append(f"attacker sent nothing: {name}")
    ratio = ratio_of(rates)
    print(
        f"requests per second: alone {spread(rates[False])}, attacked {spread(rates[True])}, "
        f"ratio {ratio:.3f}, {len(rates[True])} phases each"
    )
    if not ratio >= LEAST_RATIO:
        problems.append(f"ratio of throughput {ratio:.3f}, below {LEAST_RATIO}")
    for pid, samples in usage.items():
        (before, files, threads), (after, more_files, more_threads) = samples[0], samples[-1]
        peak = max(sample[0] for sample in samples)
        print(
            f"daemon: {before >> 20} MiB, {files} descriptors, {threads} threads after the first; "
            f"{after >> 20} MiB (at most {peak >> 20}), {more_files}, {more_threads} after the last"
        )
        if after > before + GROWTH_BYTES:
            problems.append(f"memory grew from {before} to {after} bytes")
        if more_files > files or more_threads > threads:
            problems.append(
                f"descriptors or threads grew: {files}, {threads} to {more_files}, {more_threads}"
            )
    return problems


if __name__ == "__main__":
    main()
