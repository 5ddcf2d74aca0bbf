"""Says for whom a call waits, if a mount does not answer.

A thread that opens or looks at a file waits in the kernel, without a limit. The C library's own requests say by
themselves when the daemon is stopped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

_AFTER = 5.0  # seconds of silence


class Watch:
    """One wait."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _AFTER
        self._waits: dict[str, str] = {}
        self._told = False

    def look(self) -> None:
        """Called now and then during the wait. It writes to stderr, once, that a mount does not answer."""
        if self._told or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _AFTER
        waits = dict(_waits())
        if any(self._waits.get(task) == switches for task, switches in waits.items()):
            self._told = True
            print(f"gaiafs: still waiting for {_whom()}", file=sys.stderr, flush=True)
        self._waits = waits


def _waits() -> Iterator[tuple[str, str]]:
    """Yields the threads of this process that wait for a FUSE daemon, each with how often it has waited for anything."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            if _read(f"/proc/self/task/{task}/wchan") == "request_wait_answer":
                status = _read(f"/proc/self/task/{task}/status")
                yield task, status[status.index("voluntary_ctxt_switches") :].split("\n")[0]


def _whom() -> str:
    mounts = set()
    for line in _read("/proc/self/mountinfo").splitlines():
        if " - fuse.gaiafs " in line:
            mounts.add(line.split()[2].partition(":")[2])
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):  # it has ended, or is another user's
            if _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] in "Tt" and _serves(pid, mounts):
                return f"the daemon: process {pid} is stopped, and 'kill -CONT {pid}' continues it"
    return "a mount that does not answer: 'gaiafs status' says why"


def _serves(pid: str, mounts: set[str]) -> bool:
    """Whether a process is the daemon of one of the mounts. Before Linux 6.18 that is not known."""
    for fd in os.listdir(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(OSError):
            for line in _read(f"/proc/{pid}/fdinfo/{fd}").splitlines():
                if line.startswith("fuse_connection:") and line.split()[1] in mounts:
                    return True
    return False


def _read(path: str) -> str:
    with open(path, errors="surrogateescape") as f:
        return f.read()
