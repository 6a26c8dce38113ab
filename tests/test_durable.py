"""Durable: weights get ordinary permissions, and a full disk is an error of the system."""

import errno
import stat

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_cache import durable
from dflash_cache.durable import nearest_folder, save_tensors


def test_weights_get_the_permissions_of_any_new_file(tmp_path):
    save_tensors({"a": torch.ones(3)}, tmp_path / "w.safetensors", {"format": "pt"})
    (tmp_path / "other").touch()
    modes = [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("w.safetensors", "other")]
    assert modes[0] == modes[1]
    assert load_file(tmp_path / "w.safetensors")["a"].tolist() == [1, 1, 1]


def test_a_full_disk_is_the_systems_error_with_the_path(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("Error: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(durable, "save_file", full)
    with pytest.raises(OSError, match="No space left") as error:
        save_tensors({"a": torch.ones(3)}, tmp_path / "w.safetensors")
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(tmp_path / "w.safetensors")


def test_the_nearest_folder_is_the_one_that_is_there(tmp_path):
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert nearest_folder(tmp_path) == tmp_path
