"""The host's memory, before anything large is loaded into it."""

from pathlib import Path
from typing import Final

import psutil

from .arguments import environment_number

USABLE: Final = 0.8
"""The share of the free memory that we may take: the rest is for what the system and other processes will want."""
_CGROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Bytes that this process can still take.

    Processes of a launcher share a machine's memory, and a container may have a limit of its own.
    """
    free, limit = psutil.virtual_memory().available, _CGROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        rows = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = sum(int(size) for name, size in rows if name in ("active_file", "inactive_file"))
        free = min(free, int(most) - int((_CGROUP / "memory.current").read_text()) + cached)
    return int(free // environment_number("LOCAL_WORLD_SIZE", 1))
