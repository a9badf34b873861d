#!/usr/bin/env python3
"""Finds the best strict-class mode of each trace in reports of `ringfence compare --json`.

    ringfence compare --modes none,linux-lazy,linux-strict,fence,fence-burst,copy,copy-hybrid,\\
        fence-copy,fs --json TRACE > report.json
    tests/compare/best.py report.json [more.json...]

Strict and byte-granular modes compete if their status is ok. Prints a Markdown table: the relative
throughput of `none` and `linux-lazy`, and for the best mode its relative throughput, its share of
`none`, its ratio to `linux-lazy`, the 99th percentile of its release delays (receive and transmit
buffers, us), its loss of round-trip rate, its violations and its colocated accesses. A second table
has the median and the minimum of both ratios for each kind of trace: NIC traces with buffers of at
most 4 KiB on average, NIC traces with larger buffers, and storage. Exits with 1 if a row of a
strict class has a violation, or a byte-granular row has a colocated access.
"""

import json
import statistics
import sys

STRICT = ("strict", "byte-granular")
STORAGE = ("nvme", "ahci", "boot", "mixed")
# A NIC trace has large segments if its mappings have more bytes than this on average.
LARGE = 4096


def kind(trace, rows):
    if any(word in trace for word in STORAGE):
        return "storage or mixed"
    copied = rows["copy"]["ways"]["pooled"] if "copy" in rows else None
    mean = copied["bytes"] / max(copied["buffers"], 1) if copied else 0
    return "NIC, large segments" if mean > LARGE else "NIC, up to MTU"


def main():
    broken = False
    shares = {}
    print("| trace | none | linux-lazy | best | relative throughput | of none | of linux-lazy "
          "| p99 delay receive; transmit, us | round trip lost | violations; colocated |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for path in sys.argv[1:]:
        with open(path) as file:
            results = json.load(file)["results"]
        for trace in dict.fromkeys(row["trace"] for row in results):
            rows = {row["mode"]: row for row in results if row["trace"] == trace}
            none, lazy = (rows[mode]["relative_throughput"] for mode in ("none", "linux-lazy"))
            candidates = []
            for row in rows.values():
                if row["safety"] not in STRICT or row["status_code"] != "ok":
                    continue
                violations = row["violations"]["total"]
                colocated = row["colocated"] if row["safety"] == "byte-granular" else 0
                if violations or colocated:
                    broken = True
                    print(f"{trace} {row['mode']}: {violations} violations, {colocated} colocated",
                          file=sys.stderr)
                candidates.append(row)
            if not candidates:
                print(f"| `{trace}` | {none:.2f} | {lazy:.2f} | {rows['none']['status_code']} "
                      "| | | | | | |")
                continue
            row = max(candidates, key=lambda row: row["relative_throughput"])
            best = row["relative_throughput"]
            shares.setdefault(kind(trace, rows), []).append((best / none, best / lazy))
            trip = row.get("round_trip")
            lost = f"{100 * trip['loss']:.1f}%" if trip and "-rr" in trace else ""
            delays = (row["receive_delay_p99_ns"], row["transmit_delay_p99_ns"])
            receive, transmit = (f"{(delay or 0) / 1000:.0f}" for delay in delays)
            print(f"| `{trace}` | {none:.2f} | {lazy:.2f} | `{row['mode']}` | {best:.2f} "
                  f"| {best / none:.2f} | {best / lazy:.2f} | {receive}; {transmit} | {lost} "
                  f"| {row['violations']['total']}; {row['colocated']} |")
    print()
    print("| traces | number | of none: median; least | of linux-lazy: median; least |")
    print("|---|---|---|---|")
    for name, found in sorted(shares.items()):
        columns = [
            f"{statistics.median(values):.2f}; {min(values):.2f}" for values in zip(*found)
        ]
        print(f"| {name} | {len(found)} | {columns[0]} | {columns[1]} |")
    sys.exit(broken)


main()
