"""What programs that run for long, and not libraries, may ask of the memory of their process."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_memory() -> bool:
    """
    Freed memory stays with the process, for its next allocation, instead of going back to the system. Passes over long
    sequences otherwise spend up to half of their time on getting the same memory again, page by page. Returns whether
    this system can do so; only those with glibc can.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_MAX, 0) == 1 and mallopt(M_TRIM_THRESHOLD, -1) == 1
