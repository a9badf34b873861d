#!/usr/bin/env python3
"""Judges what the guest of record.sh recorded. Usage: judge.py RINGFENCE OUT COUNT

- every case of the guest passed, and the last came;
- the NVMe recording holds, event by event, what an instance set up by hand saw meanwhile;
- `trace info` equals the count of another program, and says that nothing is lost or unmatched;
- `compare` replays every mode: strict ones show no violation, deferred ones do.
The last line is the verdict; exit code 0 or 1.
"""
import json
import pathlib
import re
import subprocess
import sys
from collections import Counter

LINE = re.compile(r"^\s*(?P<task>.+)-(?P<pid>\d+)\s+\[(?P<cpu>\d+)\]\s+\S+\s+[\d.]+: (?P<event>.*)$")
WORKLOADS = {"nvme": 1000, "e1000e": 1500}  # and the fewest maps of each

failures = []
passed = 0


def check(name, condition, why=""):
    global passed
    if condition:
        passed += 1
    else:
        failures.append(name)
        print(f"FAIL {name}: {why}")


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    check(f"{command[1:3]} ends well", done.returncode == 0, f"exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def text(path):
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", path], capture_output=True, text=True, check=True).stdout
    return path.read_text()


def events(path):
    """Events with process, processor and content: all but their times and flags."""
    found = (LINE.match(line) for line in text(path).splitlines() if not line.startswith("#"))
    return Counter((m["task"].strip(), m["pid"], m["cpu"], m["event"]) for m in found if m)


def main():
    ringfence, out, count = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    checks = (out / "checks").read_text().splitlines()
    for line in checks:
        if line.startswith(("ok ", "FAIL ")):
            check(line.removeprefix("FAIL ").removeprefix("ok "), line.startswith("ok "), "in the guest")
    check("the guest came to its end", checks[-1:] == ["done"], checks[-1:])
    print(checks[0])

    recorded, judge = events(out / "nvme.trace.zst"), events(out / "nvme.judge")
    check("nvme: as the other instance saw it", recorded == judge,
          f"only recorded {list((recorded - judge).items())[:3]}, only seen {list((judge - recorded).items())[:3]}")

    for name, least in WORKLOADS.items():
        path = out / f"{name}.trace.zst"
        [info] = json.loads(run(ringfence, "trace", "info", "--json", path))
        [counted] = map(json.loads, run("python3", count, path).splitlines())
        same = [key for key in ("lines", "events", "map_events", "unmap_events", "allocs", "frees", "iommu_map",
                                "iommu_unmap", "unmatched_unmaps", "live_at_end", "max_live")
                if info[key] != counted[key]]
        check(f"{name}: info equals the count", not same, same)
        check(f"{name}: a workload", info["map_events"] >= least, f"{info['map_events']} maps")
        for key in ("lost", "malformed", "unmatched_unmaps"):
            check(f"{name}: no {key}", info[key] == 0, info[key])
        devices = [device["name"] for device in info["devices"]]
        print(f"{name}: {info['map_events']} maps, {info['iommu_map']} iommu maps, {info['events']} events of {devices}")

        compared = json.loads(run(ringfence, "compare", "--all-modes", "--json", path))
        rows = compared["results"]
        check(f"{name}: modes", len(rows) >= 15, len(rows))
        for row in rows:
            what = f"{name}: {row['mode']}"
            check(f"{what} is sound", row["status"] == "ok", row["status"])
            check(f"{what} unmaps", row["unmaps"] >= least, row["unmaps"])
            check(f"{what} has no false faults", row["false_faults"] == 0, row["false_faults"])
            if row["safety"] in ("strict", "byte-granular"):
                check(f"{what} was attacked", row["attack_accesses"] >= row["unmaps"], row["attack_accesses"])
                check(f"{what} is safe", row["violations"]["total"] == 0, row["violations"])
            elif row["mode"] in ("defer", "linux-lazy", "none"):
                check(f"{what} is not safe", row["violations"]["total"] > 0, row["violations"])

    for name in ("INT", "TERM", "HUP", "failing", "stdout"):
        [info] = json.loads(run(ringfence, "trace", "info", "--json", out / f"{name}.trace"))
        check(f"{name}: a whole trace", info["malformed"] == 0 and info["lines"] > 0, info["lines"])
    [info] = json.loads(run(ringfence, "trace", "info", "--json", out / "lost.trace.zst"))
    check("small buffer: the trace knows what is lost", info["lost"] > 0, info["lost"])
    said = re.search(r"(\d+) events did not fit", (out / "log").read_text())
    check("small buffer: trace and recorder agree", said and int(said[1]) == info["lost"], f"{said} {info['lost']}")


def verdict():
    """Judges, and whatever comes in between, says so in one last line."""
    try:
        main()
    except (OSError, ValueError, KeyError, IndexError, subprocess.CalledProcessError) as error:
        check("the traces can be judged", False, f"{type(error).__name__}: {error}")
    first = f": {'; '.join(failures[:5])}" if failures else ""
    print(f"record.sh: {'FAIL' if failures else 'PASS'}: {passed} checks hold, {len(failures)} do not{first}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(verdict())
