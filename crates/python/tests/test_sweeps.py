"""Sweeps equal those of the command, also on a Dask cluster of which a worker died.

Tests of Ray replace the package, which CI does not install, with threads.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from types import SimpleNamespace

import pyarrow.dataset
import pytest
from distributed import Client, LocalCluster

import ringfence
from ringfence import sweeps
from ringfence.sweeps import COUNTS, run_task, sweep, tasks

PROGRAM = os.environ.get("RINGFENCE", "ringfence")

# Seconds after which a sweep that did not end fails its test, on a busy machine.
LIMIT = 300

PLAN = """
modes = ["all"]
[parameters]
ring_entries = [256, 512]
iotlb = ["16x4", "32x4"]
"""

# The columns that two runs of one task may differ in.
OF_A_RUN = ["machine", "task_seconds"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dask")
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=str(directory),
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def rows(directory):
    table = pyarrow.dataset.dataset(directory, format="parquet").to_table()
    return table.drop_columns(OF_A_RUN).sort_by("task")


def files(directory):
    """The inode and the time of each file; a file that is written again has others."""
    about = {path.name: path.stat() for path in directory.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in about.items()}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(PLAN)
    return path


@pytest.fixture(scope="module")
def killed(client, plan, tmp_path_factory):
    """The files and counts of a sweep whose one worker was killed after some files."""
    directory = tmp_path_factory.mktemp("dask-results")
    counts = {}

    def run():
        counts.update(sweep(plan, directory, engine="dask", client=client, command=PROGRAM))

    thread = threading.Thread(target=run)
    before = client.run(os.getpid)
    assert len(before) == 2
    thread.start()
    end = time.monotonic() + LIMIT
    while len(list(directory.glob("*.parquet"))) < 5:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.01)
    os.kill(next(iter(before.values())), signal.SIGKILL)
    done = len(list(directory.glob("*.parquet")))
    thread.join(LIMIT)
    assert not thread.is_alive()
    total = len(tasks(plan, command=PROGRAM))
    assert done < total - 2, "the worker died after the sweep"
    client.wait_for_workers(2, timeout=LIMIT)
    assert set(client.run(os.getpid).values()) != set(before.values())
    return directory, counts, total


def test_a_sweep_with_a_killed_worker_equals_the_command(killed, plan, tmp_path):
    directory, counts, total = killed
    assert tuple(counts) == COUNTS
    # The task of the dead worker may have its file before another worker runs it again.
    assert counts["tasks"] == counts["run"] + counts["present"] == total
    assert counts["damaged"] == counts["failed"] == 0
    expected = tmp_path / "command"
    subprocess.run(
        [PROGRAM, "sweep", str(plan), "--out", str(expected)], check=True, capture_output=True
    )
    found, wanted = rows(directory), rows(expected)
    assert found.num_rows == total
    assert found.schema == wanted.schema
    assert found.equals(wanted)


def test_a_second_sweep_runs_only_what_is_missing_or_damaged(killed, client, plan):
    directory, _, total = killed
    whole, before = rows(directory), files(directory)
    gone, cut, *kept = sorted(before)
    (directory / gone).unlink()
    damaged = bytearray((directory / cut).read_bytes())
    damaged[100] ^= 1
    (directory / cut).write_bytes(damaged)
    counts = sweep(plan, directory, engine="dask", client=client, command=PROGRAM)
    assert counts == {
        "tasks": total,
        "run": 2,
        "present": total - 2,
        "damaged": 1,
        "failed": 0,
    }
    after = files(directory)
    assert sorted(after) == sorted(before)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert rows(directory).equals(whole)


def test_a_sweep_on_this_machine_equals_the_command(killed, plan, tmp_path):
    directory, _, total = killed
    counts = ringfence.sweep(plan, tmp_path / "local", command=PROGRAM)
    assert (counts["tasks"], counts["run"], counts["failed"]) == (total, total, 0)
    assert rows(tmp_path / "local").equals(rows(directory))
    with pytest.raises(ringfence.Error, match="plan.toml"):
        ringfence.sweep(tmp_path / "plan.toml", tmp_path, command=PROGRAM)


def test_an_unknown_engine_is_an_error(plan, tmp_path):
    with pytest.raises(ValueError, match="no engine 'slurm': local, dask or ray"):
        ringfence.sweep(plan, tmp_path, engine="slurm", command=PROGRAM)


def test_a_failed_task_is_a_row(client, tmp_path):
    (tmp_path / "bad.txt").write_text("x-1 [000] ..... 1.000000: dma_map_phys: nonsense\n")
    plan = tmp_path / "plan.toml"
    plan.write_text('traces = ["bad.txt"]\nmodes = ["none", "fence"]\n')
    directory = tmp_path / "results"
    counts = sweep(plan, directory, engine="dask", client=client, command=PROGRAM)
    assert (counts["run"], counts["failed"]) == (2, 2)
    assert set(rows(directory)["outcome"].to_pylist()) == {"failed"}


@pytest.mark.parametrize("engine", ["local", "dask"])
def test_failed_tasks_run_again_on_request(client, tmp_path, engine):
    trace = tmp_path / "bad.txt"
    trace.write_text("x-1 [000] ..... 1.000000: dma_map_phys: nonsense\n")
    plan = tmp_path / "plan.toml"
    plan.write_text(f'traces = ["{trace.name}"]\nmodes = ["none", "fence"]\n')
    directory = tmp_path / "results"

    def counts(**retry):
        done = sweep(plan, directory, engine=engine, client=client, command=PROGRAM, **retry)
        return done["run"], done["present"], done["failed"]

    assert counts() == (2, 0, 2)
    before = files(directory)
    assert counts() == (0, 2, 2)
    assert files(directory) == before
    assert counts(retry_failed=True) == (2, 0, 2)
    after = files(directory)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)


def test_a_task_without_a_file_is_an_error(client, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('modes = ["none", "fence"]\n')
    occupied = tmp_path / "results"
    occupied.write_text("not a directory")
    with pytest.raises(ringfence.Error, match="2 of 2 tasks have no file") as raised:
        sweep(plan, occupied, engine="dask", client=client, command=PROGRAM)
    assert "results" in str(raised.value.__cause__)
    line = tasks(plan, command=PROGRAM)[0]
    with pytest.raises(ringfence.Error, match=json.loads(line)["name"]):
        run_task(line, occupied, command=PROGRAM)


def test_a_wrong_plan_is_an_error(client, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('modes = ["fense"]\n')
    with pytest.raises(ringfence.Error, match="plan.toml:1: .*did you mean fence"):
        sweep(plan, tmp_path / "results", engine="dask", client=client, command=PROGRAM)
    with pytest.raises(FileNotFoundError):
        none = str(tmp_path / "none")
        sweep(plan, tmp_path / "results", engine="dask", client=client, command=none)


@pytest.fixture
def threads(monkeypatch):
    """Ray with one worker thread, and the references of tasks that a sweep cancelled."""

    def wait_for(references, num_returns):
        ended = next(iter(wait(references, return_when=FIRST_COMPLETED).done))
        return [ended], [reference for reference in references if reference is not ended]

    def cancel(reference):
        cancelled.append(reference)
        reference.cancel()

    cancelled = []
    with ThreadPoolExecutor(1) as pool:

        def remote(**_options):
            return lambda task: SimpleNamespace(
                remote=lambda *args, **keywords: pool.submit(task, *args, **keywords)
            )

        ray = SimpleNamespace(
            remote=remote, wait=wait_for, get=lambda reference: reference.result(), cancel=cancel
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        yield cancelled


def test_a_complete_sweep_on_ray_cancels_nothing(threads, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('modes = ["none", "fence"]\n')
    counts = sweep(plan, tmp_path / "ray", engine="ray", command=PROGRAM)
    assert (counts["tasks"], counts["run"], counts["failed"]) == (2, 2, 0)
    assert threads == []


def test_an_interrupted_sweep_on_ray_cancels_its_tasks(threads, monkeypatch, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('modes = ["none", "fence", "strict", "defer"]\n')
    total = len(tasks(plan, command=PROGRAM))
    assert total >= 4
    ran = []
    proceed = threading.Event()

    def run_first(line, directory, **_options):
        ran.append(line)
        # All tasks after the first one wait until the sweep has ended.
        assert len(ran) == 1 or proceed.wait(LIMIT)
        return Interrupting.fromkeys(COUNTS, 0)

    class Interrupting(dict):
        def items(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "run_task", run_first)
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep(plan, tmp_path / "ray", engine="ray", command=PROGRAM)
    finally:
        proceed.set()
    assert len(threads) == total - 1
    # The thread may have begun the second task before the interrupt.
    assert len(ran) <= 2
