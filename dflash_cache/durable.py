"""Folders that appear whole or not at all: fsync everything, rename, fsync the parent."""

import errno
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash_cache.errors import DataError, UsageError

FULL = (errno.ENOSPC, errno.EDQUOT)
DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)


def refusal(path: Path, error: OSError, kept: str = "") -> ValueError:
    """A sentence for an error of writing below `path`: `DataError` if the disk is full."""
    if error.errno in FULL:
        return DataError(
            f"{path}: the disk is full; free space and run the same command again{kept}"
        )
    reason = (error.strerror or str(error)).lower()
    return UsageError(f"{path} cannot be written ({reason}); give another --out")


def check_creatable(path: Path) -> None:
    """`UsageError` unless `path` is a folder or could be created; creates nothing."""
    # os.path.exists also says no below a folder that may not be searched, where Path's raises.
    places = (path.absolute(), *path.absolute().parents)
    above = next(place for place in places if os.path.exists(place))
    if not above.is_dir():
        raise UsageError(f"{path} cannot be a folder: {above} is a file; give another --out")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(
            f"{path} cannot be written: {above} is write protected; give another --out"
        )


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    places = (path.absolute(), *path.absolute().parents)
    return next(place for place in places if os.path.isdir(place))


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


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions that any new file gets.

    safetensors itself writes files that nobody but their owner may read, so that a drafter trained
    by one user could not be served by another. Raises `OSError`, for a full disk too.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(mode)


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
