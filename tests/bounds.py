"""What reading broken and hostile files may cost."""

import contextlib
import time
import tracemalloc


@contextlib.contextmanager
def bounded(seconds: float = 5.0, memory: int = 256 << 20):
    """What runs inside may take neither long nor much memory (of Python and numpy; files are mapped)."""
    tracemalloc.start()
    start = time.monotonic()
    try:
        yield
        peak, took = tracemalloc.get_traced_memory()[1], time.monotonic() - start
    finally:
        tracemalloc.stop()
    assert took < seconds
    assert peak < memory
