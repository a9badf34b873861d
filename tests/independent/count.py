#!/usr/bin/env python3
"""Counts the events of DMA traces, independently of the Rust reader.

    count.py TRACE...

TRACE is tracefs text, plain or *.zst, which the program `zstd` decompresses. Prints one JSON object
per line. All counts are of recorded lines:

  map_events      dma_map_phys, dma_map_page, dma_map_resource and dma_map_sg
  unmap_events    the corresponding unmaps
  allocs, frees   dma_alloc, and dma_free of other pointers than null
  iommu_map       iommu:map
  iommu_unmap     iommu:unmap
  live            mappings by (device, dma_addr); scatterlists by (device, dir, length, first 128
                  phys_addrs). A map with the key of a live single mapping replaces it. Coherent
                  buffers are not counted.
  dma_pages       4 KiB pages of the physical ranges. If the line of a scatterlist does not have a
                  size for each phys_addr, only the pages of the phys_addrs count.
  iommu_pages     4 KiB pages of the paddr ranges of iommu:map
  ring            for each device and direction: unmaps, and unmaps of the oldest live mapping
  bursts          for each device, direction and CPU: consecutive unmaps, until a map of the same
                  key or a pause of more than 50 us
"""
import json
import re
import subprocess
import sys

LINE = re.compile(r"^\s*(.+)-(\d+)\s+\[(\d+)\]\s+(\S+)\s+([\d.]+): ([a-zA-Z_]+):\s+(.*)$")
SINGLE_MAP = {"dma_map_phys", "dma_map_page", "dma_map_resource"}
SINGLE_UNMAP = {"dma_unmap_phys", "dma_unmap_page", "dma_unmap_resource"}
PAGE = 4096


def text_of(path):
    if not path.endswith(".zst"):
        return open(path, encoding="utf-8", errors="replace")
    child = subprocess.Popen(["zstd", "-dcq", path], stdout=subprocess.PIPE, text=True)
    return child.stdout


def micros(text):
    seconds, fraction = text.split(".")
    return int(seconds) * 1_000_000 + int(fraction)


def pages(start, size):
    return range(start // PAGE, (start + size - 1) // PAGE + 1)


def listed(field):
    return tuple(int(entry, 16) for entry in field.strip("{}").split(","))


class Pages:
    def __init__(self):
        self.seen = set()
        self.touches = 0

    def add(self, numbers):
        self.seen.update(numbers)
        self.touches += len(numbers)

    def json(self):
        return {"distinct": len(self.seen), "touches": self.touches}


def count(path):
    total = dict.fromkeys(
        ["lines", "events", "map_events", "unmap_events", "allocs", "frees", "iommu_map",
         "iommu_unmap", "unmatched_unmaps", "replaced"], 0)
    dma_pages, iommu_pages = Pages(), Pages()
    live = {}  # key -> list of (serial, (device, dir)), oldest first; one item for single mappings
    alive, max_live, serial = 0, 0, 0
    order = {}  # (device, dir) -> dict serial -> None, in insertion order
    ring = {}
    burst_at, bursts = {}, {}
    first = last = None

    def begin(key, where, replaces):
        nonlocal alive, max_live, serial
        if replaces and key in live:
            total["replaced"] += 1
            end(key)
        serial += 1
        live.setdefault(key, []).append((serial, where))
        order.setdefault(where, {})[serial] = None
        alive += 1
        max_live = max(max_live, alive)

    def end(key):
        nonlocal alive
        number, where = live[key].pop(0)
        if not live[key]:
            del live[key]
        oldest = next(iter(order[where])) == number
        del order[where][number]
        alive -= 1
        return where, oldest

    def unmap(key, where, cpu, now):
        total["unmap_events"] += 1
        if key not in live:
            total["unmatched_unmaps"] += 1
            return
        where, oldest = end(key)
        row = ring.setdefault(where, [0, 0])
        row[0] += 1
        row[1] += oldest
        at = burst_at.get((where, cpu))
        if at is not None and now - at[0] <= 50:
            at[1] += 1
        else:
            if at is not None:
                bursts.setdefault(where, []).append(at[1])
            at = [now, 1]
        at[0] = now
        burst_at[(where, cpu)] = at

    def break_burst(where, cpu):
        at = burst_at.pop((where, cpu), None)
        if at is not None:
            bursts.setdefault(where, []).append(at[1])

    for line in text_of(path):
        total["lines"] += 1
        match = LINE.match(line)
        if not match or line.startswith("#"):
            continue
        total["events"] += 1
        cpu, now, event, payload = int(match[3]), micros(match[5]), match[6], match[7]
        first = now if first is None else first
        last = now
        if event in ("map", "unmap") and payload.startswith("IOMMU:"):
            fields = dict(word.split("=", 1) for word in payload.split() if "=" in word)
            total["iommu_" + event] += 1
            if event == "map":
                iommu_pages.add(pages(int(fields["paddr"], 16), int(fields["size"])))
            continue
        if not event.startswith("dma_"):
            continue
        device, rest = payload.split(" ", 1)
        fields = dict(word.split("=", 1) for word in rest.split() if "=" in word)
        where = (device, fields.get("dir", ""))
        if event in SINGLE_MAP:
            total["map_events"] += 1
            break_burst(where, cpu)
            begin((device, int(fields["dma_addr"], 16)), where, True)
            dma_pages.add(pages(int(fields["phys_addr"], 16), int(fields["size"])))
        elif event in SINGLE_UNMAP:
            unmap((device, int(fields["dma_addr"], 16)), where, cpu, now)
        elif event == "dma_map_sg":
            total["map_events"] += 1
            break_burst(where, cpu)
            starts = listed(fields["phys_addrs"])
            length = int(fields["nents"].split("/")[1])
            begin((device, where[1], length, starts[:128]), where, False)
            sizes = listed(fields["sizes"])
            known = len(sizes) == len(starts)
            for start, size in zip(starts, sizes if known else [1] * len(starts)):
                dma_pages.add(pages(start, size))
        elif event == "dma_unmap_sg":
            starts = listed(fields["phys_addrs"])
            unmap((device, where[1], len(starts), starts[:128]), where, cpu, now)
        elif event == "dma_alloc":
            total["allocs"] += 1
        elif event == "dma_free" and fields["virt_addr"].strip("0") != "":
            total["frees"] += 1
    for where, at in burst_at.items():
        bursts.setdefault(where[0], []).append(at[1])
    return {
        **total,
        "duration_us": (last - first) if first is not None else 0,
        "live_at_end": alive,
        "max_live": max_live,
        "dma_pages": dma_pages.json(),
        "iommu_pages": iommu_pages.json(),
        "ring": {" ".join(where): row for where, row in sorted(ring.items())},
        "bursts": {
            " ".join(where): [len(runs), sum(runs), max(runs)]
            for where, runs in sorted(bursts.items())
        },
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"trace": name, **count(name)}, sort_keys=True))
