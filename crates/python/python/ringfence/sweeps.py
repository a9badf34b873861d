"""Sweeps: on this machine, on Dask, or on Ray.

Each worker runs the command ``ringfence sweep`` on one task at a time, in a process of its own. The
command, the traces and the directory of the results have the same paths on every worker.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from ._native import Error

__all__ = ["COUNTS", "run_task", "sweep", "tasks"]

COUNTS = ("tasks", "run", "present", "damaged", "failed")
"""The counts of a sweep, as ``ringfence sweep --json`` prints them."""


def tasks(plan: str | PathLike[str], *, command: str = "ringfence") -> list[str]:
    """Return the tasks of a plan or list: the lines of ``ringfence sweep --list``."""
    done = _run([command, "sweep", fspath(plan), "--list"])
    if done.returncode != 0:
        raise Error(done.stderr.strip())
    return done.stdout.splitlines()


def run_task(
    line: str,
    directory: str | PathLike[str],
    *,
    command: str = "ringfence",
    retry_failed: bool = False,
) -> dict[str, int]:
    """Run one task and write its file, unless its intact file exists; return the counts.

    A task that fails has a file too, and counts as ``failed``. With ``retry_failed``, a task whose
    file says that it failed runs again.
    """
    name = json.loads(line)["name"]
    with tempfile.TemporaryDirectory(prefix="ringfence-") as scratch:
        task = Path(scratch, "task.jsonl")
        task.write_text(line + "\n")
        words = ["--task", name, "--jobs", "1", *_options(directory, retry_failed)]
        done = _run([command, "sweep", str(task), *words])
    # A failed task ends the command with 1 too, after its counts.
    if not done.stdout:
        raise Error(f"task {name} has no file: {done.stderr.strip() or done.returncode}")
    counts = json.loads(done.stdout)
    return {key: counts[key] for key in COUNTS}


def sweep(
    plan: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    engine: Literal["local", "dask", "ray"] = "local",
    client: Any = None,
    command: str = "ringfence",
    retry_failed: bool = False,
) -> dict[str, int]:
    """Run the tasks of a plan or list; return the sums of the counts.

    ``local`` runs them on the processors of this machine. ``dask`` runs them on the workers of
    ``client``, a ``distributed.Client``, or of the current client. ``ray`` runs them on the cluster
    that ``ray.init`` has joined. The other tasks run to their end before an exception says that a
    task has no file. With ``retry_failed``, tasks run again if their file says that they failed.
    """
    path = Path(directory).absolute()
    if engine == "local":
        done = _run([command, "sweep", fspath(plan), *_options(path, retry_failed)])
        if not done.stdout:
            raise Error(done.stderr.strip())
        counts = json.loads(done.stdout)
        return {key: counts[key] for key in COUNTS}
    engines = {"dask": _on_dask, "ray": _on_ray}
    if engine not in engines:
        raise ValueError(f"no engine {engine!r}: local, dask or ray")
    lines = tasks(plan, command=command)
    sums = dict.fromkeys(COUNTS, 0)
    errors: list[BaseException] = []
    for outcome in engines[engine](lines, path, client, command, retry_failed):
        if isinstance(outcome, BaseException):
            errors.append(outcome)
            continue
        for key, count in outcome.items():
            sums[key] += count
    if errors:
        raise Error(f"{len(errors)} of {len(lines)} tasks have no file") from errors[0]
    return sums


_Outcomes = Iterator[dict[str, int] | BaseException]


def _on_dask(
    lines: list[str], directory: Path, client: Any, command: str, retry_failed: bool
) -> _Outcomes:
    import distributed

    # The package has no types for its functions.
    as_completed: Any = distributed.as_completed
    get_client: Any = distributed.get_client
    client = client or get_client()
    futures = client.map(
        run_task,
        lines,
        directory=directory,
        command=command,
        retry_failed=retry_failed,
        pure=False,
    )
    try:
        for future in as_completed(futures):
            error = future.exception()
            yield future.result() if error is None else error
    finally:
        client.cancel(futures)


def _on_ray(
    lines: list[str], directory: Path, client: Any, command: str, retry_failed: bool
) -> _Outcomes:
    # CI does not install the package, so its types are unknown.
    ray: Any = __import__("ray")

    # Ray runs a task of a dead worker again, up to `max_retries` times.
    remote = ray.remote(max_retries=3)(run_task)
    waiting = [
        remote.remote(line, directory, command=command, retry_failed=retry_failed)
        for line in lines
    ]
    try:
        while waiting:
            [ended], waiting = ray.wait(waiting, num_returns=1)
            try:
                outcome = ray.get(ended)
            except Exception as error:
                outcome = error
            yield outcome
    finally:
        for reference in waiting:
            ray.cancel(reference)


def _options(directory: str | PathLike[str], retry_failed: bool) -> list[str]:
    retry = ["--retry-failed"] if retry_failed else []
    return ["--json", "--out", fspath(directory), *retry]


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)
