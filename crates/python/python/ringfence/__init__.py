"""Cost and exposure of DMA protection: traces and replays as Arrow tables.

``open`` reads a trace; its tables are Arrow streams, which Polars, pyarrow, pandas and DuckDB read
without copies. ``compare``, ``size`` and ``attack`` run the commands of these names, and ``modes``
lists the protection modes. ``record`` records a trace on this host. ``sweep`` runs many replays.
"""

from ._native import (
    Error,
    RecordError,
    Report,
    Stream,
    Trace,
    TraceError,
    __version__,
    attack,
    compare,
    modes,
    open,
    record,
    size,
)
from .sweeps import sweep

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
    "sweep",
]
