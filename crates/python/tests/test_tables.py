"""Shapes, types and contents of the tables, and their consumers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import DATA, lines, written

import ringfence

TABLES = ["ops", "mappings", "bursts"]
# Two modes without their own hardware, and one with rings, whose trace is read twice.
MODES = ["linux-strict", "linux-lazy", "riommu"]


def consumers(stream):
    return {
        "polars": pl.DataFrame(stream).to_arrow(),
        "pyarrow": pa.table(stream),
        "pandas": pa.Table.from_pandas(pd.DataFrame.from_arrow(stream), preserve_index=False),
        "duckdb": duckdb.from_arrow(stream).to_arrow_table(),
    }


@pytest.mark.parametrize("table", TABLES)
def test_every_consumer_reads_every_row(table):
    stream = getattr(ringfence.open("sample"), table)
    shapes = {name: read.shape for name, read in consumers(stream).items()}
    assert len(set(shapes.values())) == 1, shapes
    assert shapes["pyarrow"][0] > 100


def test_ops_equal_the_parquet_of_the_command(tmp_path):
    source = tmp_path / "lines.txt"
    source.write_text("".join(lines(40_000)))
    converted = tmp_path / "lines.parquet"
    subprocess.run(
        [os.environ["RINGFENCE"], "trace", "convert", str(source), "-o", str(converted)],
        check=True,
        capture_output=True,
    )
    expected = pyarrow.parquet.read_table(converted)
    for path in [source, converted]:
        ops = pa.table(ringfence.open(path).ops)
        assert ops.schema.names == expected.schema.names
        for name in set(ops.schema.names) - {"device"}:
            assert ops[name].type == expected[name].type, name
            assert ops[name].to_pylist() == expected[name].to_pylist(), name
        assert set(ops["device"].to_pylist()) == {"0000:00:03.0"}


def test_operations_have_the_types_of_their_fields():
    ops = pa.table(ringfence.open("sample").ops).schema
    assert ops.field("time_ns").type == pa.uint64()
    assert ops.field("cpu").type == pa.uint16()
    element = ops.field("segments").type.value_type
    assert [(field.name, field.type) for field in element] == [
        ("phys_addr", pa.uint64()),
        ("bytes", pa.uint64()),
    ]
    mappings = pa.table(ringfence.open("sample").mappings).schema
    for name in ["map_ns", "unmap_ns", "bytes"]:
        assert mappings.field(name).type == pa.uint64(), name


@pytest.mark.parametrize("trace", ["sample", "long"])
def test_mappings_pair_the_operations(trace, long_trace):
    trace = ringfence.open(long_trace if trace == "long" else trace)
    ops, mappings = pl.DataFrame(trace.ops), pl.DataFrame(trace.mappings)
    maps = ops.filter(event="map")
    assert mappings.height == maps.height
    ended = mappings["unmap_ns"].is_not_null()
    assert ended.sum() == ops.filter(event="unmap").height
    sizes = maps["segments"].list.eval(pl.element().struct.field("bytes")).list.sum()
    assert mappings["bytes"].sum() == sizes.sum()
    assert (mappings["unmap_ns"] >= mappings["map_ns"]).all()
    assert sorted(mappings["map_ns"]) == maps["time_ns"].to_list()


# CPU and event of each line: two CPUs, two devices, three classes, and lists. One map replaces
# another, a later mapping reuses an identifier, and three mappings stay live.
EVENTS = [
    (0, "dma_map_phys: net dir=TO_DEVICE dma_addr=1000 size=64 phys_addr=10001000 attrs="),
    (1, "dma_map_phys: disk dir=FROM_DEVICE dma_addr=1000 size=512 phys_addr=10002000 attrs="),
    (
        1,
        "dma_map_sg: disk dir=FROM_DEVICE nents=2/2 ents=2/2 dma_addrs={0x5000,0x9000} "
        "sizes={0x1000,0x10} phys_addrs={0x10005000,0x10009000} attrs=",
    ),
    (1, "dma_unmap_phys: net dir=TO_DEVICE dma_addr=1000 size=64 attrs="),
    (0, "dma_map_phys: net dir=FROM_DEVICE dma_addr=2000 size=128 phys_addr=10003000 attrs="),
    (1, "dma_map_phys: net dir=TO_DEVICE dma_addr=2000 size=256 phys_addr=10004000 attrs="),
    (0, "dma_unmap_sg: disk dir=FROM_DEVICE phys_addrs={0x10005000,0x10009000} attrs="),
    (
        0,
        "dma_alloc: net dir=BIDIRECTIONAL dma_addr=7000 size=4096 virt_addr=1 "
        "flags=GFP_KERNEL attrs=",
    ),
    (0, "dma_unmap_phys: disk dir=FROM_DEVICE dma_addr=1000 size=512 attrs="),
    (1, "dma_map_phys: disk dir=TO_DEVICE dma_addr=3000 size=32 phys_addr=10006000 attrs="),
]


def mapping_row(map_op, unmap_op):
    """Return the row of ``mappings`` for rows of ``ops``; a live mapping has no ``unmap_op``."""
    return {
        "device": map_op["device"],
        "direction": map_op["direction"],
        "class": map_op["class"],
        "flags": map_op["flags"],
        "map_ns": map_op["time_ns"],
        "map_cpu": map_op["cpu"],
        "unmap_ns": unmap_op and unmap_op["time_ns"],
        "unmap_cpu": unmap_op and unmap_op["cpu"],
        "replaced": unmap_op is not None and unmap_op["lines"] == 0,
        "bytes": sum(segment["bytes"] for segment in map_op["segments"]),
        "segments": len(map_op["segments"]),
    }


def test_every_column_of_mappings_equals_the_operations(tmp_path):
    path = tmp_path / "events.txt"
    with open(path, "w") as file:
        for number, (cpu, event) in enumerate(EVENTS):
            file.write(f"ip-1 [{cpu:03}] ..... 1.{number:06}: {event}\n")
    trace = ringfence.open(path)
    live, expected = {}, []
    for op in pa.table(trace.ops).to_pylist():
        if op["event"] == "map":
            assert op["mapping"] not in live
            live[op["mapping"]] = op
        else:
            expected.append(mapping_row(live.pop(op["mapping"]), op))
    expected += [mapping_row(live[mapping], None) for mapping in sorted(live)]
    assert pa.table(trace.mappings).to_pylist() == expected
    # A constant column or an exchange of two columns would differ from these rows.
    columns = [tuple(row[name] for row in expected) for name in expected[0]]
    assert len(set(columns)) == len(columns)
    assert all(len(set(column)) > 1 for column in columns)
    cpus = [(row["map_cpu"], row["unmap_cpu"]) for row in expected if row["replaced"]]
    assert cpus == [(0, 1)]


def test_bursts_equal_those_of_info(long_trace):
    for path in ["sample", long_trace]:
        trace = ringfence.open(path)
        bursts = pl.DataFrame(trace.bursts)
        flows = [
            (device["name"], flow["direction"], flow["iommu_only"], flow["bursts"])
            for device in trace.info["devices"]
            for flow in device["flows"]
        ]
        assert bursts.height == sum(flow[3]["count"] for flow in flows) > 0
        for device, direction, iommu_only, counted in flows:
            rows = bursts.filter(device=device, direction=direction, iommu_only=iommu_only)
            assert rows.height == counted["count"]
            assert rows["unmaps"].sum() == counted["unmaps"]
            assert rows["unmaps"].max() == counted["max"]


def test_info_equals_the_command(command):
    assert [ringfence.open("sample").info] == command("trace", "info", "--json")


def test_modes_equal_the_command(command):
    assert ringfence.modes() == command("modes", "--json")


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def same_build(report):
    """Remove the fields that differ between builds of the same version."""
    report["measured_on"].pop("build")
    return report


@pytest.mark.parametrize("trace", ["sample", "generated"])
def test_compare_equals_the_command(trace, tmp_path, command):
    path = [] if trace == "sample" else [str(written(tmp_path / "generated.txt", 20_000))]
    report = ringfence.compare(path[0] if path else "sample", modes=MODES, repeat=0)
    expected = command("compare", "--json", "--repeat", "0", "--modes", ",".join(MODES), *path)
    assert same_build(json.loads(report.json)) == same_build(expected)
    rows = pa.table(report.rows)
    assert rows.num_rows == len(MODES)
    for row, result in zip(rows.to_pylist(), expected["results"], strict=True):
        result = dict(leaves(result))
        missing = {name for name in row if name not in result and row[name] is not None}
        assert not missing
        for name, value in result.items():
            # A group that was not measured is null as a whole, and its columns are.
            if name in row or value is not None:
                assert row[name] == value and type(row[name]) is type(value), name


def test_default_modes_and_repetitions_are_those_of_the_command(tmp_path, command):
    path = written(tmp_path / "short.txt", 500)
    report = json.loads(ringfence.compare(path, attack=False).json)
    expected = command("compare", "--json", "--no-attack", "--repeat", "1", str(path))
    assert report["modes"] == expected["modes"]
    assert report["modes_omitted"] == expected["modes_omitted"]
    assert report["repetitions"] == 21


def test_report_columns_have_the_types_of_the_fields():
    report = ringfence.compare("sample", modes=["fence"], repeat=1)
    schema = pa.table(report.rows).schema
    for name in ["maps", "invalidations", "violations.total", "table_bytes"]:
        assert schema.field(name).type == pa.uint64(), name
    for name in ["map_cycles", "relative_throughput", "components.map_iova_alloc_cycles"]:
        assert schema.field(name).type == pa.float64(), name
    for name in ["trace", "mode", "status", "limited_by"]:
        assert schema.field(name).type == pa.string(), name
    for name, read in consumers(report.rows).items():
        assert read.num_rows == 1, name


def test_size_equals_the_command(command):
    report = ringfence.size("sample", ring_entries=[64, 256])
    expected = command("size", "--json", "--ring-entries", "64,256")
    assert json.loads(report.json) == expected
    rows = pl.DataFrame(report.rows)
    assert rows.height == sum(len(ring["sweep"]) for ring in expected["traces"][0]["rings"])
    assert rows.schema["any_order_slots"] == pl.UInt64


def test_attack_equals_the_command(command):
    modes, classes = ["linux-strict", "fence"], ["A01", "A02"]
    report = ringfence.attack(modes, classes)
    words = ["--modes", ",".join(modes), "--classes", ",".join(classes)]
    expected = command("attack", "--json", *words)
    assert json.loads(report.json) == expected
    rows = pl.DataFrame(report.rows)
    assert rows["status"].to_list() == [cell["status"] for cell in expected["cells"]]
    successes = [cell["total"]["successes"] for cell in expected["cells"]]
    assert rows["total.successes"].to_list() == successes
    assert rows.schema["total.successes"] == pl.UInt64


def test_a_recorded_trace_equals_the_command(command):
    path = str(DATA.parents[1] / "trace/tests/data/recorded-6.12.trace.zst")
    report = ringfence.compare(path, modes=["linux-strict", "fence"], repeat=0)
    expected = command(
        "compare", "--json", "--repeat", "0", "--modes", "linux-strict,fence", path
    )
    assert same_build(json.loads(report.json)) == same_build(expected)


def test_a_stream_begins_again_for_each_consumer():
    stream = ringfence.open("sample").ops
    assert pa.table(stream).equals(pa.table(stream))


def test_a_capsule_is_consumed_once():
    class Once:
        def __init__(self, capsule):
            self.capsule = capsule

        def __arrow_c_stream__(self, requested_schema=None):
            return self.capsule

    once = Once(ringfence.open("sample").ops.__arrow_c_stream__())
    assert pa.table(once).num_rows > 0
    with pytest.raises((ValueError, pa.ArrowInvalid)):
        pa.table(once)


def test_a_schema_needs_no_read(tmp_path, long_trace):
    class Schema:
        def __init__(self, stream):
            self.stream = stream

        def __arrow_c_schema__(self):
            return self.stream.__arrow_c_schema__()

    ops = ringfence.open(long_trace).ops
    assert pa.schema(Schema(ops)) == pa.RecordBatchReader.from_stream(ops).schema


def test_a_stream_is_lazy(cut_trace):
    """The batches before a malformed line arrive before the error."""
    reader = pa.RecordBatchReader.from_stream(ringfence.open(cut_trace).ops)
    first = reader.read_next_batch()
    assert 10_000 < first.num_rows < 20_000
    rows = first.num_rows
    with pytest.raises(pa.ArrowException, match="cut.txt:100001: "):
        while True:
            rows += reader.read_next_batch().num_rows
    assert 90_000 < rows <= 100_000


def test_memory_does_not_grow_with_the_trace():
    """Two passes, one over a trace that is ten times as long, need the same memory."""
    program = """
import os, resource, sys, threading
import pyarrow as pa, ringfence
from conftest import DATA, lines

def peak(pairs):
    path = sys.argv[1] + str(pairs)
    with open(path, "w") as file:
        file.writelines(lines(pairs))
    for table in ["ops", "mappings", "bursts"]:
        reader = pa.RecordBatchReader.from_stream(getattr(ringfence.open(path), table))
        for batch in reader:
            pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

short = peak(20_000)
print(peak(200_000) - short)
"""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-c", program, directory + "/trace"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    # The longer trace has 40 MB of text and 20 MB of batches.
    assert int(done.stdout) < 8 << 10, f"{done.stdout} KiB more"
