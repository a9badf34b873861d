#!/usr/bin/env python3
"""Compares reports of schema 1 with reports of schema 2, field by field.

    tests/compare/schema1to2.py run OLD NEW TRACES DIR   # replay every trace with both programs
    tests/compare/schema1to2.py compare DIR/old DIR/new  # compare two reports or directories
    tests/compare/schema1to2.py map OLD.json             # print a report with names of schema 2

OLD is a `ringfence` of schema 1 (commit 6187ef4), NEW one of schema 2; TRACES is a directory of
traces. `run` replays all modes with the attack pass and without timed repetitions. It keeps reports
that exist. `compare` checks every number and text that does not depend on the clock: modes, counts,
safety, bounds, status codes, notes on the trace, and the profile.

If a number was not measured, schema 1 has 0 and schema 2 has null; these are equal. `compare`
ignores texts for people (`status`, `source`), but not `status_code`.

Prints a line for each difference and a summary. Exits with 1 if there is a difference.
"""

import json
import pathlib
import subprocess
import sys

# Old name to new name, by object.
REPORT = {"executed_on": "measured_on", "hostile": "attack"}
PROFILE = {"c_none": "baseline_cycles", "walk_cache": "walk_cache_entries"}
MEASURED_ON = {"unit": "cycle_unit"}
TRACE = {
    "lost": "lost_events",
    "unknown": "unknown_events",
    "malformed": "malformed_lines",
    "guessed_lengths": "guessed_length_maps",
    "fresh_frames": "buffers_without_address",
    "replaced": "replaced_mappings",
    "renamed": "renamed_mappings",
    "live_at_end": "live_mappings_at_end",
    "skips_unmaps": "devices_skipping_unmaps",
}
RESULT = {
    "charged_cycles": "modelled_cycles",
    "charged_share": "modelled_share",
    "search_len_mean": "search_steps_mean",
    "search_len_max": "search_steps_max",
    "walk_references": "words_per_walk",
    "live_max": "live_mappings_max",
    "attempts": "attack_accesses",
    "live_at_end": "live_mappings_at_end",
    "stalls": "stalled_maps",
    "stalled_out": "maps_without_slot",
    "host_reads": "host_words_read",
    "kept_at_end": "kept_mappings_at_end",
    "reached_after_end": "violations_after_end",
    "overdue": "overdue_mappings",
}
COMPONENTS = {
    **{
        name: f"{name}_cycles"
        for name in (
            "map_iova_alloc",
            "map_table",
            "map_other",
            "unmap_iova_find",
            "unmap_iova_free",
            "unmap_table",
            "unmap_invalidation",
            "unmap_other",
        )
    },
    "unmap_invalidation_charged": "unmap_invalidation_modelled_cycles",
    "map_kick_charged": "map_kick_modelled_cycles",
    "unmap_kick_charged": "unmap_kick_modelled_cycles",
    "executed": "measured_cycles",
}
# Fields that vary from run to run, and texts for people.
TIMED = {
    "map_cycles",
    "unmap_cycles",
    "components",
    "modelled_share",
    "relative_throughput",
}
TEXTS = {"status", "source", "version", "schema", "cpu"}
# Fields that schema 1 lacks.
NEW = {"modes", "modes_omitted", "modelled_cycles"}
FREEBSD = {"freebsd": "freebsd-paper", "freebsd-fixed": "freebsd"}


def renamed(fields, names):
    return {names.get(name, name): value for name, value in fields.items()}


def mode_name(name):
    """Returns the new name of a mode; as-published modes had the suffix -literal, or none."""
    if name in FREEBSD:
        return FREEBSD[name]
    return f"{name.removesuffix('-literal')}-paper" if name.endswith("-literal") else name


def mapped(report):
    """Returns a report of schema 1 under the names of schema 2; its schema stays 1."""
    if report["schema"] != 1:
        raise SystemExit(f"schema {report['schema']}: not a report of schema 1")
    new = renamed(report, REPORT)
    new["profile"] = renamed(new["profile"], PROFILE)
    new["measured_on"] = renamed(new["measured_on"], MEASURED_ON)
    new["traces"] = [renamed(trace, TRACE) for trace in new["traces"]]
    rows = []
    for row in new["results"]:
        row = renamed(row, RESULT)
        row["mode"] = mode_name(row["mode"])
        if row.get("components"):
            row["components"] = renamed(row["components"], COMPONENTS)
        rows.append(row)
    new["results"] = rows
    return new


def unmeasured(value):
    """Returns the value of schema 1 for a number that was not measured."""
    if value is None:
        return 0
    if isinstance(value, list):
        return [unmeasured(item) for item in value]
    return value


def differences(name, old, new):
    """Yields a line for each field that differs, and counts compared fields in `compared`."""
    for field in sorted(old.keys() | new.keys()):
        if field in TIMED | TEXTS or field in NEW and field not in old:
            continue
        if field not in old or field not in new:
            side = "old" if field in old else "new"
            yield f"{name}: {field} only in the {side} report"
            continue
        before, after = old[field], unmeasured(new[field])
        compared[0] += 1
        if before != after:
            yield f"{name}: {field} {json.dumps(before)} -> {json.dumps(after)}"


compared = [0]


def reports(old, new):
    """Yields the differences of two reports."""
    if new["schema"] != 2:
        raise SystemExit(f"schema {new['schema']}: not a report of schema 2")
    old = mapped(old)
    nested = ("profile", "measured_on", "traces", "results")
    top = [{key: report[key] for key in report if key not in nested} for report in (old, new)]
    yield from differences("report", *top)
    yield from differences("profile", old["profile"], new["profile"])
    for kind, keys in (("traces", ("trace",)), ("results", ("trace", "mode"))):
        olds, news = (
            {tuple(item[key] for key in keys): item for item in report[kind]}
            for report in (old, new)
        )
        for missing in sorted(olds.keys() ^ news.keys()):
            yield f"{' '.join(missing)}: only in the {'old' if missing in olds else 'new'} report"
        for both in [name for name in olds if name in news]:
            yield from differences(" ".join(both), olds[both], news[both])


def compare(old, new):
    old, new = pathlib.Path(old), pathlib.Path(new)
    pairs = [(old, new)]
    if old.is_dir():
        names = {path.name for side in (old, new) for path in side.glob("*.json")}
        pairs = [(old / name, new / name) for name in sorted(names)]
    found = 0
    for before, after in pairs:
        for path in (before, after):
            if not path.exists():
                raise SystemExit(f"{path}: missing")
        for line in reports(json.loads(before.read_text()), json.loads(after.read_text())):
            found += 1
            print(line)
    print(f"{len(pairs)} pairs of reports, {compared[0]} fields compared, {found} differ")
    return bool(found)


def run(old, new, traces, out):
    """Replays each trace with both programs."""
    sides = {"old": [old, "compare"], "new": [new, "compare", "--all-modes"]}
    for trace in sorted(pathlib.Path(traces).iterdir()):
        for side, command in sides.items():
            path = pathlib.Path(out) / side / f"{trace.name}.json"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            args = [*command, "--repeat", "0", "--json", trace]
            text = subprocess.run(args, check=True, capture_output=True, text=True).stdout
            path.write_text(text)
        print(trace.name, flush=True)
    return False


def main(args):
    match args:
        case ["run", old, new, traces, out]:
            return run(old, new, traces, out)
        case ["compare", old, new]:
            return compare(old, new)
        case ["map", path]:
            print(json.dumps(mapped(json.loads(pathlib.Path(path).read_text())), indent=1))
            return False
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
