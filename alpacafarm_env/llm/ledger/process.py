"""Whether a process is gone for certain: a killed one's lease need not be waited out."""

import os
from pathlib import Path


def identity() -> str:
    """This process's PID namespace, number and start, unique on the machine; "" where the system does not tell."""
    try:
        return f"{_namespace()}/{os.getpid()}/{_start(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def is_gone(who: str) -> bool:
    """Whether the process of an `identity` has certainly ended; False where that cannot be known from here."""
    try:
        namespace, pid, start = who.split("/")
        if namespace != _namespace():
            return False  # its number means another process here
    except (OSError, ValueError):
        return False
    try:
        return _start(int(pid)) != start
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _start(pid: int) -> str:
    """When it started, in ticks since boot: a reused number belongs to a later process."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    state, *fields = stat.rpartition(")")[2].split()
    if state == "Z":  # ended, and not yet waited for
        raise ProcessLookupError
    return fields[18]
