"""The largest resident size of this process so far; mapped weights count once they were read."""

from __future__ import annotations

import resource
import sys


def peak_rss_bytes() -> int:
    """In bytes; Linux counts in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
