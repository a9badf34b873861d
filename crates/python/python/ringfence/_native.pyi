"""Types of the native module."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, final

__all__ = [
    "Error",
    "RecordError",
    "Report",
    "Stream",
    "Trace",
    "TraceError",
    "__version__",
    "attack",
    "compare",
    "modes",
    "open",
    "record",
    "size",
]

__version__: str

class Error(Exception):
    """An error of ringfence."""

class TraceError(Error):
    """An error in a trace."""

    path: str
    """Name of the trace, as given to ``open``."""
    line: int | None
    """Line of the error, from 1; ``None`` for an error of the whole file."""

class RecordError(Error):
    """A recording failed."""

@final
class Stream:
    """A table for consumers of the Arrow PyCapsule interface.

    Each consumer gets a stream from the beginning of the table. A table of a trace is read batch
    by batch, so memory does not grow with the trace.
    """

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...
    def __arrow_c_schema__(self) -> object: ...

@final
class Trace:
    """A trace. Every use reads it again."""

    @property
    def name(self) -> str:
        """The name of the trace in reports."""

    @property
    def info(self) -> dict[str, Any]:
        """Statistics, as an element of ``ringfence trace info --json``."""

    @property
    def ops(self) -> Stream:
        """One row for each map, unmap and mark."""

    @property
    def mappings(self) -> Stream:
        """One row for each mapping, in the order of the unmaps."""

    @property
    def bursts(self) -> Stream:
        """One row for each burst of unmaps."""

@final
class Report:
    """The result of a command."""

    @property
    def json(self) -> str:
        """The output of the command with ``--json``."""

    @property
    def rows(self) -> Stream:
        """The rows of the command with ``--csv``, with typed columns."""

def open(path: str | PathLike[str] | Trace, *, lenient: bool = False) -> Trace:
    """Open a trace; the string ``"sample"`` names the bundled one."""

def modes() -> list[dict[str, str]]:
    """Return the named modes, as ``ringfence modes --json`` prints them."""

def compare(
    trace: Trace | str | PathLike[str],
    modes: Sequence[str] | None = None,
    *,
    all_modes: bool = False,
    profile: str | None = None,
    iommu: str | None = None,
    devices: Sequence[str] | None = None,
    repeat: int | None = None,
    attack: bool = True,
) -> Report:
    """Replay a trace through protection modes; report cost and exposure."""

def size(
    trace: Trace | str | PathLike[str],
    modes: Sequence[str] | None = None,
    *,
    profile: str = "r210-2015",
    devices: Sequence[str] | None = None,
    ring_entries: Sequence[int] | None = None,
) -> Report:
    """Compute the sizes of rings and of the IOTLB that a trace needs."""

def attack(
    modes: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    *,
    all_modes: bool = False,
) -> Report:
    """Execute attack classes on modes."""

def record(
    path: str | PathLike[str],
    *,
    seconds: float | None = None,
    command: Sequence[str] | None = None,
    buffer_mib: int = 64,
    tracefs: str | PathLike[str] = "/sys/kernel/tracing",
) -> Trace:
    """Record the DMA mappings of this host; needs root and Linux 6.12 or later."""
