"""Limits on the cost of reading broken and hostile files."""

import contextlib
import time
import tracemalloc


@contextlib.contextmanager
def bounded(seconds: float = 30.0, memory: int = 256 << 20):
    """Fails if what runs inside takes long or much memory (of Python and numpy; files are mapped).

    Processor time of this process is counted, so that other work on the machine fails no test. The default is several
    times what the slowest reader takes on a slow machine: a fault that these limits find takes minutes or gigabytes.
    """
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        peak, took = tracemalloc.get_traced_memory()[1], time.process_time() - start
    finally:
        tracemalloc.stop()
    assert took < seconds
    assert peak < memory
