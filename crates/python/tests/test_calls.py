"""Errors, signals and threads."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import ringfence

HERE = Path(__file__).parent

# Seconds after which a call that did not end fails its test, on a busy machine.
LIMIT = 300


def test_a_malformed_line_names_file_and_line():
    path = HERE / "malformed.txt"
    calls = [
        lambda: ringfence.open(path).info,
        lambda: ringfence.compare(path, modes=["none"], repeat=0),
        lambda: ringfence.size(str(path)),
    ]
    for call in calls:
        with pytest.raises(ringfence.TraceError) as raised:
            call()
        error = raised.value
        assert (error.path, error.line) == (str(path), 2)
        assert str(error) == f"{path}:2: dir is not one of the kernel's directions"
        assert isinstance(error, ringfence.Error)


@pytest.mark.parametrize("table", ["ops", "mappings", "bursts"])
def test_an_error_of_a_stream_names_file_and_line(table):
    path = HERE / "malformed.txt"
    stream = getattr(ringfence.open(path), table)
    with pytest.raises(pa.ArrowException, match=f"{path}:2: dir is not one"):
        pa.table(stream)


def test_a_lenient_read_counts_malformed_lines():
    trace = ringfence.open(HERE / "malformed.txt", lenient=True)
    assert trace.info["malformed"] == 1
    assert pa.table(trace.ops).num_rows == 0


def test_a_file_that_cannot_be_opened_is_an_oserror(tmp_path):
    missing = tmp_path / "missing.txt"
    for call in [
        lambda: ringfence.open(missing),
        lambda: ringfence.compare(missing),
        lambda: ringfence.size(missing),
    ]:
        with pytest.raises(FileNotFoundError) as raised:
            call()
        assert raised.value.filename == str(missing)


def test_an_error_of_a_whole_file_has_no_line(tmp_path):
    path = tmp_path / "trace.gz"
    path.write_bytes(b"\x1f\x8b\x08 and more")
    with pytest.raises(ringfence.TraceError) as raised:
        ringfence.open(path)
    assert (raised.value.path, raised.value.line) == (str(path), None)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(b"PAR1 and no footer")
    with pytest.raises(ringfence.TraceError, match="damaged Parquet"):
        ringfence.open(cut)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ringfence.compare("sample", modes=["fance"]), "no mode is named"),
        (lambda: ringfence.compare("sample", modes=[]), "give modes"),
        (lambda: ringfence.compare("sample", modes=["fence"], all_modes=True), "give modes"),
        (lambda: ringfence.compare("sample", modes=["alloc=x"]), "alloc"),
        (lambda: ringfence.compare("sample", profile="no-such"), "no profile"),
        (lambda: ringfence.compare("sample", iommu="z80"), "no IOMMU family"),
        (lambda: ringfence.compare("sample", iommu="amd", profile="r210-2015"), "profile"),
        (lambda: ringfence.compare("sample", modes=["riommu"], iommu="amd"), "iommu"),
        (lambda: ringfence.compare("sample", devices=["eth9"]), "names no device"),
        (lambda: ringfence.compare("sample", repeat=10_001), "at most"),
        (lambda: ringfence.size("sample", modes=["riommu"]), "does not map pages"),
        (lambda: ringfence.size("sample", ring_entries=[0]), "slots"),
        (lambda: ringfence.size("sample", devices=["eth9"]), "names no device"),
        (lambda: ringfence.attack(classes=["A99"]), "no attack class"),
        (lambda: ringfence.record("x"), "give seconds or command"),
        (lambda: ringfence.record("x", seconds=float("nan")), "seconds"),
    ],
)
def test_an_invalid_argument_is_a_value_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_argument_of_another_type_is_a_type_error():
    for call in [
        lambda: ringfence.open(7),
        lambda: ringfence.compare("sample", modes="fence"),
        lambda: ringfence.compare("sample", repeat=-1),
    ]:
        with pytest.raises((TypeError, OverflowError)):
            call()


def test_a_recording_without_tracefs_is_an_error(tmp_path):
    output = tmp_path / "x.trace.zst"
    with pytest.raises(ringfence.RecordError, match="no tracefs"):
        ringfence.record(output, seconds=0.0, tracefs=tmp_path)
    assert list(tmp_path.iterdir()) == []


# Each call but the last reads a trace without an end, so only a signal ends it.
CALLS = {
    "compare": "ringfence.compare(trace, modes=['none', 'fence'], repeat=0)",
    "size": "ringfence.size(trace)",
    "info": "trace.info",
    "ops": "pa.table(trace.ops)",
    "mappings": "for batch in pa.RecordBatchReader.from_stream(trace.mappings): pass",
    "attack": "ringfence.attack(all_modes=True)",
}

CHILD = """
import os, signal, sys, threading
import pyarrow as pa, ringfence

# A reader may begin inside a line that the writer wrote for an earlier one.
trace = ringfence.open(sys.argv[1], lenient=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
{before}
try:
    print("ready", flush=True)
    try:
        {call}
    except pa.ArrowInvalid:
        # The interface passes a text only. The signal is pending again.
        threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_a_call(name, endless_trace):
    program = CHILD.format(before="", call=CALLS[name])
    words = [sys.executable, "-c", program, str(endless_trace)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGINT)
            output, _ = child.communicate(timeout=LIMIT)
        finally:
            child.kill()
    assert (output, child.returncode) == ("interrupted\n", 0)


@pytest.mark.parametrize("name", ["compare", "size", "info"])
def test_a_call_releases_the_lock_of_the_interpreter(name, endless_trace):
    """Another thread runs during the call, and ends it."""
    before = """
def other():
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)

begun = threading.Event()
threading.Thread(target=other, daemon=True).start()
# A thread keeps the lock until it releases it.
sys.setswitchinterval(1000)
"""
    # Nothing between the event and the call releases the lock.
    program = CHILD.format(before=before, call=f"begun.set()\n        {CALLS[name]}")
    words = [sys.executable, "-c", program, str(endless_trace)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "ready\ninterrupted\n", done.stderr


def test_threads_read_at_once(long_trace):
    trace = ringfence.open(long_trace)
    rows = []
    readers = [
        threading.Thread(target=lambda: rows.append(pa.table(trace.ops).num_rows))
        for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert rows == [400_000] * 3
