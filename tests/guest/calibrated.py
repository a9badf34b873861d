"""Checks a profile of `calibrate --host` and two reports of `compare` that use it.

    calibrated.py PROFILE UNKNOWN KNOWN strict|lazy FUNCTION

KNOWN has the cost of an operation without protection, UNKNOWN does not have it. FUNCTION is the
kernel function that invalidates. Prints the times that the guest's kernel took.
"""

import json
import math
import re
import sys
import tomllib

COMMENT = re.compile(r"^#   (\S+).* \((\w+)\): (\d+) ns, (\d+) calls$", re.M)
COPY = re.compile(r"^#   copying a page of 4 KiB between warm buffers: [1-9]\d* ns$", re.M)

path, unknown, known, mode, function = sys.argv[1:]
text = open(path).read()
profile = tomllib.loads(text)
unknown, known = (json.load(open(name)) for name in (unknown, known))


def check(holds, failure):
    if not holds:
        sys.exit(f"{failure}:\n{text}")


# The comments have the mean time and the number of calls of each function.
calls = {}
for work, name, mean, count in COMMENT.findall(text):
    calls.setdefault(work, []).append((name, int(mean), int(count)))
count = {work: sum(n for _, _, n in rows) for work, rows in calls.items()}
check({"map", "unmap", "invalidation"} <= count.keys(), "a comment is missing")
check(COPY.search(text), "the time of a copy is missing")
is_virtual = "# This machine is virtual" in text and "in a virtual machine" in profile["source"]
check(is_virtual, "the profile does not say that the machine is virtual")
check(count["map"] > 100 and count["unmap"] > 100, "the disk did not work")

source = profile["sources"]["invalidation_cycles"]
form = r"measured: (\w+), (\d+) ns in the mean of (\d+) calls for (\d+) unmaps(; lazy mode: .*)?"
name, mean, flushes, unmaps, lazy_note = re.fullmatch(form, source).groups()
mean, flushes = int(mean), int(flushes)
check(int(unmaps) == count["unmap"], "the number of unmaps differs from the comment")
is_known = name == function and (name, mean, flushes) in calls["invalidation"]
check(is_known, "the invalidation function is another one, or differs from the comment")
clock, cycles = profile["clock_ghz"], profile["invalidation_cycles"]
check(0.2 < clock < 10, "the clock is not plausible")
# The mean is printed in whole nanoseconds.
is_mean = cycles > 0 and abs(cycles - mean * clock) <= clock + 1
check(is_mean, "the cycles differ from the mean time at this clock")
ratio = flushes / count["unmap"]
if mode == "strict":
    # The first and the last call may be outside the buffer.
    check(flushes + 2 >= count["unmap"], "strict: fewer flushes than unmaps")
    check(not lazy_note, "strict: the profile names lazy mode")
else:
    check(ratio < 0.5, "lazy: more than one flush for two unmaps")
    check(lazy_note, "lazy: the profile does not name lazy mode")
for absent in ("baseline_cycles", "miss_cycles", "iotlb_sets", "device_side", "kick_cycles"):
    check(absent not in profile, f"{absent} was not measured")

for report in (unknown, known):
    check(report["profile"]["invalidation_cycles"] == cycles, "compare: the profile is another one")
    rows = {row["mode"]: row for row in report["results"]}
    strict = rows["linux-strict"]["modelled_cycles"]
    check(strict == cycles, "compare: strict does not pay an invalidation per unmap")
    lazy_cycles = rows["linux-lazy"]["modelled_cycles"]
    check(0 < lazy_cycles < cycles / 2, "compare: lazy pays at least half of strict, or nothing")
    modes = ("none", "linux-lazy", "linux-strict")
    shares = [rows[name]["relative_throughput"] for name in modes]
    if report is unknown:
        check(shares == [None] * 3, "compare: a throughput without the cost of no protection")
    else:
        # The cycles of none and of lazy are differences of timings, which can be negative, so that
        # their throughput can exceed 1. That of strict is mostly the invalidation.
        for row in rows.values():
            cost = known["profile"]["baseline_cycles"]
            share = cost / (cost + row["map_cycles"] + row["unmap_cycles"])
            is_share = math.isclose(row["relative_throughput"], share)
            check(is_share, f"compare: the throughput of {row['mode']} is not that of its cycles")
        check(0 < shares[2] < min(1, shares[1]), "compare: strict is faster than none or lazy")

times = ", ".join(f"{work} {rows[0][1]} ns" for work, rows in calls.items())
print(
    f"{times} ({ratio:.2f} invalidations per unmap); {clock:.2f} GHz, {cycles} cycles; "
    f"relative throughput of linux-strict {shares[2]:.2g}"
)
