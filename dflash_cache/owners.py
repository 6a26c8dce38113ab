"""Folders in the making: whose they are, and whether that process still lives."""

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

A_DAY = 24 * 3600
DEAD = ("Z", "X")  # killed, but its parent has not asked for its exit code yet
PATTERN = r"(?P<host>.+)-(?P<pid>\d+)-(?P<start>\d+)"


@dataclass(frozen=True)
class Owner:
    """A process: its host, its id, and when it started, which tells a reused id apart."""

    host: str
    pid: int
    start: int

    @staticmethod
    def this() -> "Owner":
        return Owner(socket.gethostname(), os.getpid(), start_time(os.getpid()))

    @staticmethod
    def of(match: re.Match[str]) -> "Owner":
        """From a match of `PATTERN`."""
        return Owner(match["host"], int(match["pid"]), int(match["start"]))

    def __str__(self) -> str:
        """`<host>-<pid>-<start time>`, for the name of a folder."""
        return f"{self.host}-{self.pid}-{self.start}"

    def is_alive(self, folder: Path) -> bool:
        """Whether it may still work on `folder`.

        Processes of other hosts cannot be seen: they count as alive until nothing in the folder
        has changed for a day.
        """
        if self.host != socket.gethostname():
            return newest(folder) >= time.time() - A_DAY
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        state, start = _stat(self.pid)
        return state not in DEAD and start in (self.start, 0)


def start_time(pid: int) -> int:
    """When a process started: clock ticks since boot on Linux, 0 where that is not known."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, int]:
    """(state, start time) of a process; ("", 0) where that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def newest(path: Path) -> float:
    """The latest change of anything in a folder; now if it is vanishing meanwhile."""
    try:
        return max(p.stat().st_mtime for p in [path, *path.rglob("*")])
    except OSError:
        return time.time()
