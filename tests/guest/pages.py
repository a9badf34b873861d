"""Checks the recordings of pages.sh with `ringfence trace judge`.

    pages.py RINGFENCE LAZY STRICT

The arguments are the command and the directories of the guests' results. In the guest in lazy mode,
a device could access pages that the kernel had given to other tasks; in strict mode, it could not.
The last line is the verdict. Exits with 0 or 1.
"""

import json
import pathlib
import re
import subprocess
import sys


def check(holds, failure):
    if not holds:
        print(f"pages.py: FAIL: {failure}")
        sys.exit(1)


def text(directory, name):
    return (directory / name).read_text().strip()


def judgement(ringfence, directory, domain, has_exposures):
    """Returns the judgement of a guest's recording, after checks that hold in both modes."""
    log = f"{directory}/log"
    names = ("record", "judge", "live")
    recorded, judged, live = (text(directory, f"{name}.code") for name in names)
    expected = "3" if has_exposures else "0"
    check(recorded == "0", f"`trace record` ended with {recorded}; see {log}")
    check(judged == expected, f"`trace judge` ended with {judged}, not {expected}; see {log}")
    check(live in ("0", expected), f"`trace judge --record` ended with {live}; see {log}")
    check(text(directory, "instances") == "", f"{directory}: a tracing instance remains")
    (live,) = json.loads(text(directory, "record.json"))
    check(live["page_allocs"] > 0, f"{directory}: `trace judge --record` found no page allocation")
    (guest,) = json.loads(text(directory, "judge.json"))
    check(guest["complete"] and guest["lost"] == 0, f"{directory}: events are lost")
    check(
        guest["page_allocs"] > 1000 and guest["page_frees"] > 1000,
        f"{directory}: {guest['page_allocs']} page allocations, {guest['page_frees']} frees",
    )
    nvme = [device for device in guest["devices"] if device["domain"] is not None]
    check(nvme, f"{directory}: no device with a domain")
    for device in nvme:
        check(device["domain"] == domain, f"{directory}: the domain is not {domain}: {device}")
    unmaps = sum(device["unmaps"] for device in nvme)
    check(unmaps >= 150, f"{directory}: {unmaps} unmaps, fewer than 150")
    # The command on the host must give the same result as the guest's command.
    command = [ringfence, "trace", "judge", "--json", directory / "pages.trace.zst"]
    done = subprocess.run(command, capture_output=True, check=False)
    code = str(done.returncode)
    check(code == expected, f"{directory}: `trace judge` ended with {code} on the host")
    (host,) = json.loads(done.stdout)
    check(host == guest, f"{directory}: the judgements in the guest and on the host differ")
    return guest


def check_lines(directory, judged):
    """Compares the longest exposures with the lines of the trace that they name."""
    command = ["zstd", "-dcq", directory / "pages.trace.zst"]
    done = subprocess.run(command, capture_output=True, check=True)
    trace = done.stdout.decode(errors="replace").splitlines()
    checked = 0
    for exposure in judged["longest"]:
        page, line = exposure["address"] >> 12, exposure["allocated"]["line"]
        alloc, unmap = trace[line - 1], exposure["unmap_line"]
        found = re.search(r"mm_page_alloc: .* pfn=0x([0-9a-f]+) order=(\d+)", alloc)
        check(found, f"line {line} is not an allocation: {alloc}")
        first, order = int(found[1], 16), int(found[2])
        check(first <= page < first + (1 << order), f"page {page:#x} is not in {alloc}")
        if unmap is not None:
            check(re.search(r"unmap|dma_free", trace[unmap - 1]), f"line {unmap} is not an unmap")
            checked += 1
    return checked


def main():
    ringfence, lazy, strict = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    in_lazy = judgement(ringfence, lazy, "lazy", True)
    in_strict = judgement(ringfence, strict, "strict", False)
    stale = in_lazy["stale"]
    check(stale["count"] > 0, "lazy mode: no page was accessible after its unmap")
    check(in_strict["stale"]["count"] == 0, "strict mode: pages were accessible after their unmap")
    check(in_lazy["mapped"]["count"] == 0, "lazy mode: the kernel reused pages that were mapped")
    checked = check_lines(lazy, in_lazy)
    print(
        f"{text(lazy, 'kernel')}: lazy mode {stale['count']} pages for up to "
        f"{stale['longest_ns'] / 1e6:.2f} ms ({stale['byte_seconds']:.0f} byte-seconds; the trace "
        f"confirms {checked} of them), strict mode 0: OK"
    )


main()
