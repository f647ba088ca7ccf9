"""The processors on which threads may run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

#: If any of these is set, OpenMP binds threads to processors.
BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")


@contextlib.contextmanager
def engines_processors() -> Iterator[None]:
    """Threads that are started here may use all processors that vLLM's engine process, the parent, may.

    On CPUs vLLM has OpenMP bind its threads. GNU's then binds a worker's main thread to one core, and threads
    inherit that: one that moves bytes would use the very core that computes, while those that vLLM leaves to
    others are idle. Where OpenMP binds nothing, a worker's processors may be those of its device's NUMA node.
    """
    if not any(name in os.environ for name in BINDINGS):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own | os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
