"""The stubs agree with the module, and a program that uses them checks."""

import subprocess
import sys
from pathlib import Path

PROGRAM = '''
from pathlib import Path

import ringfence
from ringfence.sweeps import sweep, tasks

trace: ringfence.Trace = ringfence.open(Path("x"))
names: list[str] = [mode["mode"] for mode in ringfence.modes()]
report = ringfence.compare(trace, names, repeat=0)
text: str = report.json
rows: ringfence.Stream = report.rows
try:
    ringfence.size("sample", ring_entries=[64])
except ringfence.TraceError as error:
    line: int | None = error.line
lines: list[str] = tasks("plan.toml")
counts: dict[str, int] = sweep(Path("plan.toml"), "results", client=None)
ringfence.compare("sample", modes="fence", repeat="3")  # E: the last argument
'''


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=cwd
    )


def test_the_stubs_equal_the_module(tmp_path):
    done = run("mypy.stubtest", "ringfence", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_python_of_the_package_is_checked(tmp_path):
    done = run("mypy", "--strict", "--package", "ringfence", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_program_is_checked(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("mypy", "--strict", "program.py", cwd=tmp_path)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    last = PROGRAM.count("\n")
    assert errors and all(line.startswith(f"program.py:{last}:") for line in errors), done.stdout
    assert '"repeat"' in done.stdout
