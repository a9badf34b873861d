#!/usr/bin/env python3
"""Prints the cost of a read from three runs of the case "counted" of live.sh: counted.py DIR.

If the host disturbed a run, prints "disturbed: RUN" and the reason instead; live.sh repeats it.
"""

import pathlib
import re
import sys

RUNS = ("first", "second", "more")
case = pathlib.Path(sys.argv[1])


def counters(run):
    lines = (case / f"{run}.counters").read_text().splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}


def reads_of(run):
    """Returns the reads that waited for the disk, all reads, and the median of those in ns."""
    text = (case / run).read_text()
    reads = int(re.search(r"^(\d+) reads of ", text, re.M)[1])
    found = re.search(r"^waited: (\d+) of them, (\d+) ns of work the median", text, re.M)
    return (int(found[1]), reads, int(found[2])) if found else (0, reads, 0)


runs = {run: reads_of(run) for run in RUNS}
for run, (waited, reads, _) in runs.items():
    if waited < reads / 2:
        sys.exit(print(f"disturbed: {run} run, only {waited} of {reads} reads waited for the disk"))
medians = sorted((median, run) for run, (_, _, median) in runs.items())
(least, _), (middle, _), (most, _) = medians
if most > least * 1.001:
    median, run = medians[2] if most - middle > middle - least else medians[0]
    sys.exit(print(f"disturbed: {run} run, its median {median} is an outlier: {least} to {most}"))
few, many = counters("first"), counters("more")
COUNTER = r'ringfence_(.*)_total{device="(.*)"}'
per_read = {re.sub(COUNTER, r"\2 \1", name): (many[name] - few[name]) / 500 for name in few}
print(
    "a read: "
    + ", ".join(f"{value:g} {name}" for name, value in per_read.items() if value)
    + f", median instructions {[median for _, _, median in runs.values()]}"
    + f" of {[waited for waited, _, _ in runs.values()]} reads that waited"
)
