#!/usr/bin/env python3
"""Checks the traces that the guest of record.sh recorded.

    judge.py RINGFENCE OUT COUNT

RINGFENCE is the command, OUT the directory with the guest's results, COUNT the path of count.py.

- Every case of the guest passed, and the guest completed the last one.
- The NVMe recording has the same events as a tracing instance that the guest configured by hand.
- `trace info` equals the result of count.py. No event is lost or unmatched.
- `compare` replays every mode. Strict modes have no violation, deferred ones have some.

The last line is the verdict. Exits with 0 or 1.
"""

import json
import pathlib
import re
import subprocess
import sys
from collections import Counter

LINE = re.compile(
    r"^\s*(?P<task>.+)-(?P<pid>\d+)\s+\[(?P<cpu>\d+)\]\s+\S+\s+[\d.]+: (?P<event>.*)$"
)
# The workloads and their minimum numbers of maps.
WORKLOADS = {"nvme": 1000, "e1000e": 1500}
# Counts of both `trace info` and count.py.
COUNTS = (
    "lines",
    "events",
    "map_events",
    "unmap_events",
    "allocs",
    "frees",
    "iommu_map",
    "iommu_unmap",
    "unmatched_unmaps",
    "live_at_end",
    "max_live",
)

failures = []
passed = 0


def check(name, holds, reason=""):
    global passed
    if holds:
        passed += 1
    else:
        failures.append(name)
        print(f"FAIL {name}: {reason}")


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    reason = f"exit status {done.returncode}: {done.stderr.strip()}"
    check(f"{command[1:3]} succeeds", done.returncode == 0, reason)
    return done.stdout


def text(path):
    if path.suffix == ".zst":
        command = ["zstd", "-dcq", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return path.read_text()


def events(path):
    """Counts events by task, process ID, CPU and content. Their times and flags do not count."""
    matches = (LINE.match(line) for line in text(path).splitlines() if not line.startswith("#"))
    return Counter((m["task"].strip(), m["pid"], m["cpu"], m["event"]) for m in matches if m)


def main():
    ringfence, out, count = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    checks = (out / "checks").read_text().splitlines()
    for line in checks:
        if line.startswith(("ok ", "FAIL ")):
            name = line.removeprefix("FAIL ").removeprefix("ok ")
            check(name, line.startswith("ok "), "the check failed in the guest")
    check("the guest completed all cases", checks[-1:] == ["done"], checks[-1:])
    print(checks[0])

    recorded, expected = events(out / "nvme.trace.zst"), events(out / "nvme.judge")
    extra, missing = recorded - expected, expected - recorded
    check(
        "nvme: the recording equals that of the other instance",
        recorded == expected,
        f"extra events {list(extra.items())[:3]}, missing events {list(missing.items())[:3]}",
    )

    for name, least in WORKLOADS.items():
        path = out / f"{name}.trace.zst"
        [info] = json.loads(run(ringfence, "trace", "info", "--json", path))
        [counted] = map(json.loads, run("python3", count, path).splitlines())
        different = [key for key in COUNTS if info[key] != counted[key]]
        check(f"{name}: `trace info` equals count.py", not different, different)
        maps = info["map_events"]
        check(f"{name}: at least {least} maps", maps >= least, f"{maps} maps")
        for key in ("lost", "malformed", "unmatched_unmaps"):
            check(f"{name}: no {key}", info[key] == 0, info[key])
        devices = [device["name"] for device in info["devices"]]
        print(
            f"{name}: {maps} maps, {info['iommu_map']} iommu maps, {info['events']} events of "
            f"{devices}"
        )

        compared = json.loads(run(ringfence, "compare", "--all-modes", "--json", path))
        rows = compared["results"]
        check(f"{name}: at least 15 modes", len(rows) >= 15, len(rows))
        for row in rows:
            mode, accesses = f"{name}: {row['mode']}", row["attack_accesses"]
            check(f"{mode}: the status is ok", row["status"] == "ok", row["status"])
            check(f"{mode}: at least {least} unmaps", row["unmaps"] >= least, row["unmaps"])
            check(f"{mode}: no false faults", row["false_faults"] == 0, row["false_faults"])
            if row["safety"] in ("strict", "byte-granular"):
                check(f"{mode}: an attack for each unmap", accesses >= row["unmaps"], accesses)
                check(f"{mode}: no violation", row["violations"]["total"] == 0, row["violations"])
            elif row["mode"] in ("defer", "linux-lazy", "none"):
                check(f"{mode}: violations", row["violations"]["total"] > 0, row["violations"])

    for name in ("INT", "TERM", "HUP", "failing", "stdout"):
        [info] = json.loads(run(ringfence, "trace", "info", "--json", out / f"{name}.trace"))
        is_complete = info["malformed"] == 0 and info["lines"] > 0
        check(f"{name}: the trace is complete", is_complete, info["lines"])
    [info] = json.loads(run(ringfence, "trace", "info", "--json", out / "lost.trace.zst"))
    lost = info["lost"]
    check("small buffer: the trace counts lost events", lost > 0, lost)
    found = re.search(r"(\d+) events did not fit", (out / "log").read_text())
    reported = found and int(found[1])
    check("small buffer: trace and recorder agree", reported == lost, f"{reported}, {lost}")


def run_checks():
    """Runs the checks and prints the verdict, also after an exception. Returns true on failure."""
    try:
        main()
    except (OSError, ValueError, KeyError, IndexError, subprocess.CalledProcessError) as error:
        check("the results can be read", False, f"{type(error).__name__}: {error}")
    first = f": {'; '.join(failures[:5])}" if failures else ""
    verdict = "FAIL" if failures else "PASS"
    print(f"record.sh: {verdict}: {passed} checks hold, {len(failures)} do not{first}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(run_checks())
