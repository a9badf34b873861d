"""Fixtures of the tests: the command, traces of several sizes, and a checked subprocess."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parent

LINE = (
    "ip-1 [000] ..... {time}: dma_{verb}_phys: 0000:00:03.0 dir=FROM_DEVICE "
    "dma_addr={address:x} size=2048{buffer} attrs=\n"
)


def lines(pairs: int, live: int = 64):
    """Yield the lines of ``pairs`` maps and unmaps, with ``live`` mappings alive at once."""
    for number in range(pairs + live):
        time = f"{number // 1000000}.{number % 1000000:06}"
        if number < pairs:
            slot = 0x1000 * (1 + number % (2 * live))
            address = 0xF0000000 + slot
            buffer = f" phys_addr={0x10000000 + slot:x}"
            yield LINE.format(time=time, verb="map", address=address, buffer=buffer)
        if number >= live:
            address = 0xF0000000 + 0x1000 * (1 + (number - live) % (2 * live))
            yield LINE.format(time=time, verb="unmap", address=address, buffer="")


def written(path: Path, pairs: int) -> Path:
    """Write a trace of ``pairs`` maps and unmaps, and return its path."""
    with open(path, "w") as file:
        file.writelines(lines(pairs))
    return path


@pytest.fixture(scope="session")
def long_trace(tmp_path_factory) -> Path:
    """A trace of 400,000 operations."""
    return written(tmp_path_factory.mktemp("traces") / "long.txt", 200_000)


WRITER = """
import sys
from conftest import lines

while True:
    # A reader that ends closes the pipe; the next one gets a new trace.
    try:
        with open(sys.argv[1], "w") as pipe:
            pipe.writelines(lines(1 << 60))
    except BrokenPipeError:
        pass
"""


@pytest.fixture
def endless_trace(tmp_path):
    """A FIFO from which every reader gets a trace without an end."""
    path = tmp_path / "endless"
    os.mkfifo(path)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=DATA) as writer:
        try:
            yield path
        finally:
            writer.kill()


@pytest.fixture(scope="session")
def cut_trace(tmp_path_factory) -> Path:
    """A trace whose 100,001st line is malformed."""
    path = tmp_path_factory.mktemp("traces") / "cut.txt"
    with open(path, "w") as file:
        for number, line in enumerate(lines(60_000)):
            file.write("no event\n" if number == 100_000 else line)
    return path


@pytest.fixture(scope="session")
def command():
    """The command ``ringfence`` with ``--json`` output as objects."""
    program = os.environ["RINGFENCE"]

    def run(*words: str):
        done = subprocess.run([program, *words], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return run
