"""The examples of the documents and the notebook run."""

import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("document", ["docs/PYTHON.md", "crates/python/README.md"])
def test_examples_run(document, monkeypatch):
    monkeypatch.chdir(ROOT)
    run_examples(document)


def test_examples_of_sweeps_run(monkeypatch, tmp_path):
    """The command writes the results that the first example reads; Dask finds them complete."""
    (tmp_path / "crates").symlink_to(ROOT / "crates")
    monkeypatch.chdir(tmp_path)
    program = Path(os.environ["RINGFENCE"])
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    words = ["sweep", "crates/sweep/examples/plan.toml", "-o", "results"]
    subprocess.run([program, *words], check=True, capture_output=True)
    names = run_examples("docs/SWEEP.md")
    assert names["counts"]["tasks"] == names["counts"]["present"] == 6


def run_examples(document):
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)
    assert examples
    # As in a session: later examples use the names of earlier ones.
    names = {"__name__": "__main__"}
    for example in examples:
        exec(compile(example, document, "exec"), names)
    return names


def test_the_notebook_runs():
    notebook = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Outputs are not committed, so none can be out of date.
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
    assert all(cell.outputs for cell in cells[1:])
