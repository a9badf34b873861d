#!/usr/bin/env python3
"""What a read costs, from three runs of live.sh's case "counted", or which of them the host disturbed: counted.py DIR"""

import pathlib
import re
import sys

RUNS = ("first", "second", "more")
case = pathlib.Path(sys.argv[1])


def counters(run):
    lines = (case / f"{run}.counters").read_text().splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}


def waited(run):
    """How many reads waited for the disk, of how many, and their median."""
    text = (case / run).read_text()
    reads = int(re.search(r"^(\d+) reads of ", text, re.M)[1])
    found = re.search(r"^waited: (\d+) of them, (\d+) ns of work the median", text, re.M)
    return (int(found[1]), reads, int(found[2])) if found else (0, reads, 0)


runs = {run: waited(run) for run in RUNS}
for run, (some, reads, _) in runs.items():
    if some < reads / 2:
        sys.exit(print(f"disturbed: {run} run, of {reads} reads only {some} waited"))
medians = sorted((median, run) for run, (_, _, median) in runs.items())
(least, _), (middle, _), (most, _) = medians
if most > least * 1.001:
    odd = medians[2] if most - middle > middle - least else medians[0]
    sys.exit(print(f"disturbed: {odd[1]} run, its median is {odd[0]}, of {least} to {most}"))
few, many = counters("first"), counters("more")
each = {re.sub(r'ringfence_(.*)_total{device="(.*)"}', r"\2 \1", name): (many[name] - few[name]) / 500 for name in few}
print(
    "a read: "
    + ", ".join(f"{value:g} {name}" for name, value in each.items() if value)
    + f", instructions {[median for _, _, median in runs.values()]}, medians of {[some for some, _, _ in runs.values()]} that waited"
)
