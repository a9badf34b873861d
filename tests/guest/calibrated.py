"""Checks a profile of `calibrate --host` and two reports of `compare` with it:
calibrated.py PROFILE UNKNOWN KNOWN strict|lazy FUNCTION. KNOWN has a cost without protection, UNKNOWN has none.
Prints what the guest's kernel needed."""

import json
import re
import sys
import tomllib

path, unknown, known, mode, function = sys.argv[1:]
text = open(path).read()
profile = tomllib.loads(text)
unknown, known = (json.load(open(name)) for name in (unknown, known))


def check(holds, what):
    if not holds:
        sys.exit(f"{what}:\n{text}")


# The comments have the mean time and the number of calls of each function.
calls = {}
for work, name, mean, count in re.findall(r"^#   (\S+).* \((\w+)\): (\d+) ns, (\d+) calls$", text, re.M):
    calls.setdefault(work, []).append((name, int(mean), int(count)))
count = {work: sum(n for _, _, n in rows) for work, rows in calls.items()}
check({"map", "unmap", "invalidation"} <= count.keys(), "a comment is missing")
check(re.search(r"^#   copying a page of 4 KiB between warm buffers: [1-9]\d* ns$", text, re.M), "no copy")
check("# This machine is virtual" in text and "in a virtual machine" in profile["source"], "not said to be virtual")
check(count["map"] > 100 and count["unmap"] > 100, "the disk did not work")

source = profile["sources"]["invalidation_cycles"]
form = r"measured: (\w+), (\d+) ns in the mean of (\d+) calls for (\d+) unmaps(; lazy mode: .*)?"
name, mean, flushes, unmaps, lazy = re.fullmatch(form, source).groups()
mean, flushes = int(mean), int(flushes)
check(int(unmaps) == count["unmap"], "another number of unmaps")
check(name == function and (name, mean, flushes) in calls["invalidation"], "another function")
clock, cycles = profile["clock_ghz"], profile["invalidation_cycles"]
check(0.2 < clock < 10, "no plausible clock")
# The mean is printed in whole nanoseconds.
check(cycles > 0 and abs(cycles - mean * clock) <= clock + 1, "the cycles are not the time")
ratio = flushes / count["unmap"]
if mode == "strict":
    # The first and the last call may be outside the buffer.
    check(flushes + 2 >= count["unmap"] and not lazy, "strict: fewer flushes than unmaps")
else:
    check(ratio < 0.5 and lazy, "lazy: as many flushes as unmaps")
for absent in ("baseline_cycles", "miss_cycles", "iotlb_sets", "device_side", "kick_cycles"):
    check(absent not in profile, f"{absent} was not measured")

for report in (unknown, known):
    check(report["profile"]["invalidation_cycles"] == cycles, "compare: another profile")
    rows = {row["mode"]: row for row in report["results"]}
    check(rows["linux-strict"]["modelled_cycles"] == cycles, "compare: strict does not pay an invalidation per unmap")
    check(0 < rows["linux-lazy"]["modelled_cycles"] < cycles / 2, "compare: lazy pays as much as strict")
    shares = [rows[one]["relative_throughput"] for one in ("none", "linux-lazy", "linux-strict")]
    if report is unknown:
        check(shares == [None] * 3, "compare: a throughput without a cost")
    else:
        # The cycles of none are a difference of timings around 0, on either side of it.
        check(all(isinstance(one, float) and one > 0 for one in shares), "compare: no throughput")
        check(max(shares[1:]) <= 1, "compare: more throughput than without protection")
        check(shares[1] > shares[2], "compare: strict is faster than lazy")

times = ", ".join(f"{work} {rows[0][1]} ns" for work, rows in calls.items())
print(f"{times} ({ratio:.2f} invalidations for an unmap); {clock:.2f} GHz, {cycles} cycles; relative throughput of linux-strict {shares[2]:.2g}")
