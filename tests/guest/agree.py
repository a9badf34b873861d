#!/usr/bin/env python3
"""Compares the events of the guest's tracepoints with the requests that its IOMMU received.

    tests/guest/agree.py REQUESTS TRACE

REQUESTS is the output of `ringfence guest run --record-requests`. TRACE is the text of tracefs with
iommu:map and iommu:unmap since boot. Both are of one guest with one device behind the IOMMU. The
events must contain all requests in their order, with these differences:

- a request can be a part of an event, because the kernel sends one for each page size;
- the kernel writes an event shortly after it queues the request, so the events of two processes can
  be swapped. The events of one address must be in the order of the requests.

Prints a summary. Exits with 0 if events and requests agree, otherwise with 1.
"""

import re
import sys
from collections import defaultdict

IOVA = r"iova=(?:0x)?([0-9a-f]+)(?: - 0x[0-9a-f]+)?"
SIZE = r"size=(0x[0-9a-f]+|\d+)"
MAP = re.compile(rf"\bmap: IOMMU: {IOVA} paddr=(?:0x)?([0-9a-f]+) {SIZE}")
UNMAP = re.compile(rf"\bunmap: IOMMU: {IOVA} {SIZE} unmapped_{SIZE}")


def requests(path):
    """Yields (op, first, last, physical) of each MAP and UNMAP."""
    lines = open(path).read().splitlines()
    if not lines or lines[-1] != "end":
        sys.exit(f"{path}: the last line is not \"end\"; the record is incomplete")
    for line in lines:
        words = line.split()
        if words[0] not in ("map", "unmap"):
            continue
        if words[-1] != "ok":
            sys.exit(f"{path}: a request was refused: {line}")
        field = dict(word.split("=") for word in words[1:-1])
        physical = int(field["physical"], 16) if words[0] == "map" else None
        yield words[0], int(field["start"], 16), int(field["last"], 16), physical


def events(path):
    """Yields (op, first, last, physical) of each event."""
    for line in open(path, errors="replace"):
        if "LOST" in line and "EVENTS" in line:
            sys.exit(f"{path}: {line.strip()}: increase trace_buf_size")
        if found := MAP.search(line):
            start, physical, size = int(found[1], 16), int(found[2], 16), int(found[3], 0)
            yield "map", start, start + size - 1, physical
        elif found := UNMAP.search(line):
            start, size, unmapped = int(found[1], 16), int(found[2], 0), int(found[3], 0)
            if size != unmapped:
                sys.exit(f"{path}: the kernel unmapped only a part: {line.strip()}")
            yield "unmap", start, start + size - 1, None
        elif " map: " in line or " unmap: " in line:
            sys.exit(f"{path}: unknown format: {line.strip()}")


def by_page(operations):
    """Returns the operations of each page in order, which do not depend on the splits of ranges."""
    pages = defaultdict(list)
    for op, first, last, physical in operations:
        for page in range(first, last + 1, 4096):
            pages[page].append((op, None if physical is None else physical + page - first))
    return pages


def main():
    recorded, traced = list(requests(sys.argv[1])), list(events(sys.argv[2]))
    if not traced:
        sys.exit(f"{sys.argv[2]}: no events")
    differences = []
    recorded_by_page, traced_by_page = by_page(recorded), by_page(traced)
    for page in sorted(recorded_by_page.keys() | traced_by_page.keys()):
        if recorded_by_page[page] != traced_by_page[page]:
            asked, seen = recorded_by_page[page], traced_by_page[page]
            pairs = enumerate(zip(asked, seen))
            at = next((n for n, (a, b) in pairs if a != b), min(len(asked), len(seen)))
            differences.append(
                f"{page:#x}: {len(asked)} requests, {len(seen)} events; from number {at + 1} on "
                f"{asked[at:at + 2]} and {seen[at:at + 2]}"
            )
    same_position = sum(a == b for a, b in zip(recorded, traced))
    counts = {op: sum(1 for event in traced if event[0] == op) for op in ("map", "unmap")}
    print(
        f"{len(traced)} events ({counts['map']} maps, {counts['unmap']} unmaps), "
        f"{len(recorded)} requests: {len(differences)} of {len(traced_by_page)} addresses differ; "
        f"{same_position} requests have the same position as their events"
    )
    for line in differences[:10]:
        print(f"  {line}")
    sys.exit(bool(differences))


main()
