"""Checks the recordings of pages.sh: `ringfence trace judge` finds pages of other tasks that a device
could reach in the guest in lazy mode, and none in the guest in strict mode.

    pages.py RINGFENCE LAZY STRICT

The arguments are the command and the directories of the guests' results. The last line is the
verdict; exit code 0 or 1."""

import json
import pathlib
import re
import subprocess
import sys


def fail(why):
    print(f"pages.py: FAIL: {why}")
    sys.exit(1)


def check(condition, why):
    if not condition:
        fail(why)


def text(directory, name):
    return (directory / name).read_text().strip()


def judgement(ringfence, directory, domain, found):
    """Returns the judgement of a guest's recording, after checks that hold in both modes."""
    check(text(directory, "record.code") == "0", f"{directory}: record ended with an error; see log")
    code = "3" if found else "0"
    got = text(directory, "judge.code")
    check(got == code, f"{directory}: judge ended with {got}, not {code}; see judge.json and log")
    check(text(directory, "live.code") in ("0", code), f"{directory}: judge --record failed; see log")
    check(text(directory, "instances") == "", f"{directory}: a tracing instance remains")
    check(json.loads(text(directory, "record.json"))[0]["page_allocs"] > 0, "judge --record saw no pages")
    (judged,) = json.loads(text(directory, "judge.json"))
    check(judged["complete"] and judged["lost"] == 0, f"{directory}: events are lost")
    check(judged["page_allocs"] > 1000 and judged["page_frees"] > 1000, "few page events")
    nvme = [one for one in judged["devices"] if one["domain"] is not None]
    check(nvme and all(one["domain"] == domain for one in nvme), f"{directory}: not {domain}: {nvme}")
    check(sum(one["unmaps"] for one in nvme) >= 150, f"{directory}: few unmaps: {nvme}")
    # The command on this machine sees the same as the guest's.
    here = subprocess.run([ringfence, "trace", "judge", "--json", directory / "pages.trace.zst"],
                          capture_output=True, check=False)
    check(str(here.returncode) == code, f"{directory}: judge ends with {here.returncode} on the host")
    (again,) = json.loads(here.stdout)
    check(again == judged, f"{directory}: the judgements in the guest and on the host differ")
    return judged


def follow(directory, judged):
    """Checks each described exposure against the lines of the trace that it names."""
    trace = subprocess.run(["zstd", "-dcq", directory / "pages.trace.zst"], capture_output=True,
                           check=True).stdout.decode(errors="replace").splitlines()
    checked = 0
    for one in judged["longest"]:
        page = one["address"] >> 12
        alloc, unmap = trace[one["allocated"]["line"] - 1], one["unmap_line"]
        found = re.search(r"mm_page_alloc: .* pfn=0x([0-9a-f]+) order=(\d+)", alloc)
        check(found, f"line {one['allocated']['line']} is no allocation: {alloc}")
        first, order = int(found[1], 16), int(found[2])
        check(first <= page < first + (1 << order), f"{page:#x} is not in {alloc}")
        if unmap is not None:
            check(re.search(r"unmap|dma_free", trace[unmap - 1]), f"line {unmap} is no unmap")
            checked += 1
    return checked


def main():
    ringfence, lazy, strict = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    loose = judgement(ringfence, lazy, "lazy", True)
    tight = judgement(ringfence, strict, "strict", False)
    check(loose["stale"]["count"] > 0, "lazy mode: no page was reachable after its unmap")
    check(tight["stale"]["count"] == 0, "strict mode: pages were reachable after their unmap")
    check(loose["mapped"]["count"] == 0, "lazy mode: pages were given away while mapped")
    followed = follow(lazy, loose)
    print(f"{text(lazy, 'kernel')}: lazy mode {loose['stale']['count']} pages for up to "
          f"{loose['stale']['longest_ns'] / 1e6:.2f} ms ({loose['stale']['byte_seconds']:.0f} "
          f"byte-seconds; {followed} followed to their lines), strict mode 0: OK")


main()
