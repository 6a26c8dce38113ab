"""Folders that appear whole or not at all: fsync everything, rename, fsync the parent."""

import errno
import os
import shutil
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flush one file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(root: Path) -> None:
    """Flush every file below `root` and every folder, the inner ones first."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))


def publish(staged: Path, final: Path) -> bool:
    """Flush the folder `staged` and rename it to `final`, durably.

    False if `final` is there already (another process was first): it stays, `staged` is removed.
    """
    fsync_tree(staged)
    try:
        os.rename(staged, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        shutil.rmtree(staged)
        return False
    fsync_path(final.parent)
    return True
