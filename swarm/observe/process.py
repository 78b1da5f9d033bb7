"""Figures of this process that the standard library has no portable call for."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory now; where only the peak is known, the peak; 0 where neither is."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
