#!/usr/bin/env python3
"""Checks reports of `ringfence compare --json` against the promises of their modes.

    ringfence compare --all-modes --repeat 3 --json ../shared/traces/raw/*.zst > report.json
    tests/compare/check.py report.json [more.json...]

A mode whose status is not ok claims nothing: the script lists it and does not check it. There are
two exceptions. A broken promise is an error. If a ring does not fit the driver, the maps that got a
slot are checked. All other modes must satisfy these rules:

- strict modes and `pool`: attack accesses >= unmaps, no violation, no false fault;
- bounded modes: violations and a stale window if more than 1000 mappings ended;
- modes with rings: no colocated access; modes that use any free slot never stall a map;
- modes with a pool that stays mapped: no invalidation and no stale window. If buffers were mapped,
  there is a pool, and attackers access it after unmaps. Modes that map large buffers need no pool,
  and invalidate at most once for each unmap;
- modes that map pages: colocated accesses in all of them, or in none if every buffer fills its
  pages;
- a para-virtual host: at least one frame if the guest maps, and at least one word read per frame.
  With the host optimisations (hopt), requests, kicks and frames stay equal; words read, walks and
  awaited frames do not increase;
- modes with a cache: no window longer than their bound (T x (C + 1), 4 ms), and at most as many
  requests and kicks as without the cache;
- other modes with a host: at least as many requests as unmaps, and at most as many kicks as
  requests. Strict ones kick once for each map and unmap, and in between only if a list fills the
  queue. A nested one kicks once for each unmap, and for no map;
- if the mean search of strict takes 5 or more steps and cycles were measured, the allocator of
  strict costs more than that of strict+.

Prints a line for each trace and for each broken promise. Exits with 1 if there is one.
"""

import json
import sys

MANY = 1000
# Requests that the guest's queue holds.
QUEUE = 128
PAPER_RINGS = ("riommu-paper", "riommu--paper")
RINGS = ("riommu", "riommu-", "riommu-ooo", *PAPER_RINGS)
COPIES = ("copy", "copy-hybrid", "fence-copy", "virtio-bounce")
# Modes that map large buffers.
SPLITS = ("copy-hybrid", "fence-copy")
# Modes with a pool that stays mapped: for copies, or for the driver's own buffers.
POOLS = (*COPIES, "pool")
# Modes whose drivers keep their buffers.
KEEPS = ("pool", "premap")
PAPER = (*PAPER_RINGS, "rtc-paper")
CACHES = ("pviommu+rtc", "pviommu+rtc+hopt", "pviommu+rtc-adaptive", "pviommu+map-cache")
# Modes that the rule on colocated accesses does not cover: no IOMMU, pass-through, rings, pools.
NO_PAGES = ("none", "hwpt", "swpt", "kvm-baseline", "rtc-paper", *RINGS, *POOLS)
# The same host without and with the optimisations of the PVIOMMU paper.
HOSTS = ("pviommu+rtc", "pviommu+rtc+hopt")


def broken(row):
    """Yields the broken promises of a row. As-published modes promise nothing."""
    if row["mode"] in PAPER:
        return
    if row["false_faults"]:
        yield f"{row['false_faults']} false faults"
    if row["violations"] is None:
        yield "the attack pass is missing, so safety is unknown"
        return
    if row["safety"] in ("strict", "byte-granular", "own-pool"):
        if row["attack_accesses"] < row["unmaps"]:
            yield f"{row['attack_accesses']} attack accesses for {row['unmaps']} unmaps"
        if row["violations"]["total"]:
            yield f"violations {row['violations']}"
        if not row["attack_accesses"] and row["maps"]:
            yield "no attack access"
    if row["safety"] == "byte-granular" and row["colocated"]:
        yield f"{row['colocated']} colocated accesses"
    if row["mode"] in POOLS:
        if row["mode"] not in SPLITS and row["invalidations"] or row["stale_window_max_ns"]:
            window = row["stale_window_max_ns"]
            yield f"{row['invalidations']} invalidations, a stale window of {window} ns"
        if row["invalidations"] > row["unmaps"]:
            yield f"{row['invalidations']} invalidations for {row['unmaps']} unmaps"
        needs_pool = row["mode"] not in SPLITS and row["maps"] > 0
        if needs_pool and not row["pool_bytes"] or row["pool_bytes"] and not row["maps"]:
            yield f"a pool of {row['pool_bytes']} bytes for {row['maps']} maps"
        reached = row["shadow_accesses"] + row["mutable_after_release"]
        if row["unmaps"] and row["pool_bytes"] and not reached:
            yield "attackers never reached the pool"
    elif row["pool_bytes"] or row["shadow_accesses"] and row["mode"] != "premap":
        yield f"a pool of {row['pool_bytes']} bytes in a mode without one"
    if row["mutable_after_release"] and row["mode"] not in KEEPS:
        count = row["mutable_after_release"]
        yield f"{count} writes to released buffers in a mode whose drivers have no pool"
    if row["mode"] == "riommu-ooo" and row["stalled_maps"]:
        yield f"{row['stalled_maps']} maps waited"
    if row["mode"].startswith("pviommu"):
        if row["host_frames"] < (row["maps"] > 0) or row["host_frames"] > row["host_words_read"]:
            frames, words = row["host_frames"], row["host_words_read"]
            yield f"{frames} frames for {words} words read from the second stage"
    elif row["host_words_read"] and row["mode"] not in PAPER:
        yield f"{row['host_words_read']} words read without a second stage"
    if row["mode"] in CACHES:
        if row["kicks"] > row["requests"]:
            yield f"{row['requests']} requests and {row['kicks']} kicks"
        # The bound has the form "40 s: 10 s x 4". The cache checks it once a millisecond. A map
        # cache has no bound.
        bound = float((row.get("bound") or "inf s").split(" s")[0]) * 1e9
        window = row["stale_window_max_ns"]
        if window > bound + 1e6:
            yield f"a stale window of {window} ns exceeds the bound {row.get('bound')}"
    elif row["mode"] == "virtio-bounce":
        # A request maps at least a run of 16 pages, or one larger slot.
        if row["kicks"] != row["requests"] or row["requests"] > row["pool_bytes"] // 4096:
            requests, kicks = row["requests"], row["kicks"]
            yield f"{requests} requests and {kicks} kicks for {row['pool_bytes']} bytes"
    elif row["mode"].startswith(("emulated-", "nested-", "virtio-", "pviommu")):
        if not row["unmaps"] <= row["kicks"] <= row["requests"]:
            yield f"{row['requests']} requests and {row['kicks']} kicks for {row['unmaps']} unmaps"
        more = row["kicks"] - row["maps"] - row["unmaps"]
        # A nested guest sends no request for a map.
        strict = ("emulated-strict", "virtio-strict", "pviommu")
        if row["mode"] == "nested-strict" and not row["kicks"] == row["requests"] == row["unmaps"]:
            yield f"{row['requests']} requests and {row['kicks']} kicks for {row['unmaps']} unmaps"
        if row["mode"] in strict and not 0 <= more <= row["requests"] // QUEUE:
            yield f"{row['kicks']} kicks for {row['maps']} maps and {row['unmaps']} unmaps"
    elif row["mode"].startswith("xen"):
        # Each operation writes one table entry. Single calls enter the hypervisor for each one.
        if row["requests"] < row["maps"] + row["unmaps"]:
            yield f"{row['requests']} operations for {row['maps']} maps and {row['unmaps']} unmaps"
        single = row["mode"] in ("xen", "xen-lazy")
        if row["kicks"] > row["requests"] or single and row["kicks"] != row["requests"]:
            yield f"{row['kicks']} hypercalls for {row['requests']} operations"
    elif row["requests"]:
        yield f"{row['requests']} requests without a host"
    if row["mode"] == "optimistic" and row["stale_window_max_ns"] > 5e6:
        window = row["stale_window_max_ns"]
        yield f"a stale window of {window} ns exceeds the bound {row.get('bound')}"
    if row["safety"] == "bounded" and row["unmaps"] > MANY:
        if not row["violations"]["total"]:
            yield "a bounded mode without a violation"
        if not row["stale_window_max_ns"]:
            yield "a bounded mode without a stale window"


def unoptimised(plain, optimised):
    """Yields the counts of an optimised host that break the rule of the host optimisations."""
    for field in ("requests", "kicks", "invalidations", "host_frames"):
        if optimised[field] != plain[field]:
            yield f"{field} {optimised[field]}, without the optimisations {plain[field]}"
    for field in ("host_words_read", "host_walks", "host_frames_awaited"):
        if optimised[field] > plain[field]:
            yield f"{field} {optimised[field]}, without the optimisations {plain[field]}"
    if plain["host_frames_awaited"] != plain["host_frames"]:
        awaited, frames = plain["host_frames_awaited"], plain["host_frames"]
        yield f"{awaited} of {frames} frames awaited without a pool"


def main(paths):
    traces = {}
    timed = True
    for path in paths:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        timed = timed and report["repetitions"] > 0
        for row in report["results"]:
            traces.setdefault(row["trace"], {})[row["mode"]] = row
    failures = 0
    long_searches = []
    for name, rows in traces.items():
        lines = []
        for mode, row in rows.items():
            if row["status_code"] == "broken-promise":
                failures += 1
                lines.append(f"{mode}: BROKEN: {row['status']}")
                continue
            if row["status_code"] == "ring-does-not-fit":
                lines.append(f"{mode}: {row['status']}")
                row = {**row, "safety": "byte-granular"}
            elif row["status"] != "ok":
                lines.append(f"{mode}: not checked: {row['status']}")
                continue
            promises = list(broken(row))
            failures += len(promises)
            lines += [f"{mode}: BROKEN: {promise}" for promise in promises]
        uncached = rows.get("pviommu")
        for mode in CACHES:
            if uncached and mode in rows and uncached["status"] == rows[mode]["status"] == "ok":
                pair = (rows[mode], uncached)
                requests, kicks = ([row[field] for row in pair] for field in ("requests", "kicks"))
                if requests[0] > requests[1] or kicks[0] > kicks[1]:
                    failures += 1
                    lines.append(
                        f"BROKEN: {mode} sends {requests[0]} requests and {kicks[0]} kicks, "
                        f"pviommu {requests[1]} and {kicks[1]}"
                    )
                kept = rows[mode]["kept_mappings_at_end"]
                lines.append(
                    f"{mode}: {requests[0]} requests instead of {requests[1]}, "
                    f"{kept} mappings kept at the end"
                )
        hosts = [rows.get(mode) for mode in HOSTS]
        if all(row and row["status"] == "ok" for row in hosts):
            promises = list(unoptimised(*hosts))
            failures += len(promises)
            lines += [f"{HOSTS[1]}: BROKEN: {promise}" for promise in promises]
            for counter in ("walks", "words_read", "frames_awaited"):
                counts = [row[f"host_{counter}"] for row in hosts]
                lines.append(
                    f"{HOSTS[1]}: {counts[1]} {counter} of its host instead of {counts[0]}"
                )
        checked = [row for row in rows.values() if row["status"] == "ok"]
        paged = [row for row in checked if row["mode"] not in NO_PAGES]
        colocated = [row for row in paged if row["colocated"]]
        if 0 < len(colocated) < len(paged):
            failures += 1
            lines.append(
                f"BROKEN: colocated accesses in {len(colocated)} of {len(paged)} modes that map "
                "pages"
            )
        if len(lines) == len(rows) and len({line.split(": ", 1)[1] for line in lines}) == 1:
            lines = [f"all modes: {lines[0].split(': ', 1)[1]}"]
        strict, plus = rows.get("strict"), rows.get("strict+")
        if strict and plus and (strict["search_steps_mean"] or 0) >= 5 and timed:
            costs = [row["components"]["map_iova_alloc_cycles"] for row in (strict, plus)]
            long_searches.append(f"{name} {costs[0]:.0f}/{costs[1]:.0f}")
            if costs[0] <= costs[1]:
                failures += 1
                lines.append(
                    f"BROKEN: strict allocates in {costs[0]:.0f} cycles, strict+ in {costs[1]:.0f}"
                )
        unmaps = max(row["unmaps"] for row in rows.values())
        page = "colocated accesses" if colocated else "no colocated access"
        print(f"{name}: {len(checked)} of {len(rows)} modes checked, {unmaps} unmaps, {page}")
        for line in lines:
            print(f"  {line}")
        for mode in RINGS:
            if mode in rows and rows[mode]["stalled_maps"]:
                stalled, without_slot = rows[mode]["stalled_maps"], rows[mode]["maps_without_slot"]
                maps = rows[mode]["maps"] + without_slot
                print(f"  {mode}: {stalled} of {maps} maps waited, {without_slot} got no slot")
    print(
        f"the mean search of strict takes 5 or more steps on {len(long_searches)} traces; cycles "
        f"of an allocation, strict/strict+: {', '.join(long_searches)}"
    )
    row_count = sum(map(len, traces.values()))
    print(f"{len(traces)} traces, {row_count} rows, {failures} broken promises")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
