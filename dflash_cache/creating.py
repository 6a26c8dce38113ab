"""Many processes want one folder: one of them makes it, whole or not at all, the others wait."""

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from dflash_cache.durable import publish
from dflash_cache.errors import DataError
from dflash_cache.owners import PATTERN, Owner

PREFIX = ".creating-"
POLL = 0.1


def create_once(
    path: Path,
    is_there: Callable[[], bool],
    build: Callable[[Path], None],
    wait: float,
    report: Callable[[str], None],
) -> None:
    """Return when `is_there()`: made here by `build(folder)` and one rename, or elsewhere.

    While another living process is making it, this one waits, `wait` seconds at most, then raises
    `DataError`. What dead processes of this host left is removed. Nothing is locked: if two begin
    in the same instant both may build, and the first to rename wins.
    """
    deadline, told = time.monotonic() + wait, False
    while not is_there():
        other = next(iter(_others(path).items()), None)
        if other is None:
            _attempt(path, build)
            continue
        if not told:
            report(f"waiting for process {other[1].pid} on {other[1].host} to create {path}")
            told = True
        if time.monotonic() > deadline:
            raise _too_long(path, *other, wait)
        time.sleep(POLL)
    _others(path)  # removes what dead ones left


def _attempt(path: Path, build: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The last part is for threads of one process, which do not wait for each other.
    name = f"{PREFIX}{Owner.this()}-{uuid.uuid4().hex[:8]}.{path.name}"
    staged = path.parent / name
    try:
        staged.mkdir()
        # Of processes that began together the one with the first name goes on.
        if all(name < other.name for other in _others(path)):
            build(staged)
            publish(staged, path)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _others(path: Path) -> dict[Path, Owner]:
    """Folders in which other living processes make `path`; removes those of dead ones."""
    pattern = re.compile(
        re.escape(PREFIX) + PATTERN + r"-[0-9a-f]{8}\." + re.escape(path.name), re.DOTALL
    )
    found: dict[Path, Owner] = {}
    for entry in _names(path.parent):
        match = pattern.fullmatch(entry)
        if match is None or Owner.of(match) == Owner.this():
            continue
        folder = path.parent / entry
        if Owner.of(match).is_alive(folder):
            found[folder] = Owner.of(match)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _names(folder: Path) -> list[str]:
    """[] for a folder that is not there yet, or in which nobody could make anything."""
    readable = os.access(folder, os.R_OK | os.X_OK)
    return sorted(os.listdir(folder)) if readable and folder.is_dir() else []


def _too_long(path: Path, folder: Path, owner: Owner, wait: float) -> DataError:
    return DataError(
        f"{path}: process {owner.pid} on {owner.host} has not finished creating the cache within "
        f"{wait:g} s; give a longer --wait, or remove {folder} if that process no longer runs"
    )
