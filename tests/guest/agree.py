#!/usr/bin/env python3
"""Do the guest's tracepoints and the requests that its IOMMU saw agree, event for event?

    tests/guest/agree.py REQUESTS TRACE

REQUESTS is what `ringfence guest run --record-requests` wrote, TRACE the text of tracefs with iommu:map and iommu:unmap since boot, from one guest
with one device behind the IOMMU. The events have to be all the requests, in their order:

- a request can be a part of an event: the kernel asks once for each size of page;
- an event is written a little after its request was queued, so two processes can be written the other way round. Never so two events
  of one address: those have to be in the requests' order.

Prints what agrees and exits with 0, or what does not and 1.
"""

import re
import sys
from collections import defaultdict

MAP = re.compile(r"\bmap: IOMMU: iova=(?:0x)?([0-9a-f]+)(?: - 0x[0-9a-f]+)? paddr=(?:0x)?([0-9a-f]+) size=(0x[0-9a-f]+|\d+)")
UNMAP = re.compile(r"\bunmap: IOMMU: iova=(?:0x)?([0-9a-f]+)(?: - 0x[0-9a-f]+)? size=(0x[0-9a-f]+|\d+) unmapped_size=(0x[0-9a-f]+|\d+)")


def requests(path):
    """(op, first, last, physical) of each MAP and UNMAP."""
    lines = open(path).read().splitlines()
    if not lines or lines[-1] != "end":
        sys.exit(f"{path}: not whole")
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
    """The same of each event."""
    for line in open(path, errors="replace"):
        if "LOST" in line and "EVENTS" in line:
            sys.exit(f"{path}: {line.strip()}: a larger buffer (trace_buf_size)")
        if found := MAP.search(line):
            start, physical, size = int(found[1], 16), int(found[2], 16), int(found[3], 0)
            yield "map", start, start + size - 1, physical
        elif found := UNMAP.search(line):
            start, size, unmapped = int(found[1], 16), int(found[2], 0), int(found[3], 0)
            if size != unmapped:
                sys.exit(f"{path}: not all was unmapped: {line.strip()}")
            yield "unmap", start, start + size - 1, None
        elif " map: " in line or " unmap: " in line:
            sys.exit(f"{path}: not understood: {line.strip()}")


def by_page(operations):
    """For each page, what happened to it, in order: splits of ranges do not show, orders of one address do."""
    pages = defaultdict(list)
    for op, first, last, physical in operations:
        for page in range(first, last + 1, 4096):
            pages[page].append((op, None if physical is None else physical + page - first))
    return pages


def main():
    asked, seen = list(requests(sys.argv[1])), list(events(sys.argv[2]))
    if not seen:
        sys.exit("no events")
    wrong = []
    asked_by_page, seen_by_page = by_page(asked), by_page(seen)
    for page in sorted(asked_by_page.keys() | seen_by_page.keys()):
        if asked_by_page[page] != seen_by_page[page]:
            ours, theirs = asked_by_page[page], seen_by_page[page]
            at = next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            wrong.append(f"{page:#x}: {len(ours)} requests, {len(theirs)} events; from the {at + 1}th on {ours[at:at + 2]} and {theirs[at:at + 2]}")
    exact = sum(a == b for a, b in zip(asked, seen))
    counts = {op: sum(1 for one in seen if one[0] == op) for op in ("map", "unmap")}
    print(
        f"{len(seen)} events ({counts['map']} maps, {counts['unmap']} unmaps), {len(asked)} requests: "
        f"{len(wrong)} addresses of {len(seen_by_page)} differ; {exact} at the same place of the whole order"
    )
    for line in wrong[:10]:
        print(f"  {line}")
    sys.exit(bool(wrong))


main()
