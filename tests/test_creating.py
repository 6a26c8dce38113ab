"""One process makes the folder, the others wait; the dead are not waited for."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_cache import creating
from dflash_cache.creating import create_once
from dflash_cache.errors import DataError
from dflash_cache.owners import Owner, start_time


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def staged_by(owner: Owner, path: Path) -> Path:
    folder = path.parent / f".creating-{owner}-0123abcd.{path.name}"
    folder.mkdir()
    (folder / "half").write_text("x")
    return folder


def owner_of(process: subprocess.Popen) -> Owner:
    return Owner(socket.gethostname(), process.pid, start_time(process.pid))


def create(path: Path, wait: float = 0.2) -> list[str]:
    lines: list[str] = []

    def build(folder: Path) -> None:
        (folder / "manifest.json").write_text("mine")

    create_once(path, lambda: (path / "manifest.json").is_file(), build, wait, lines.append)
    return lines


def test_a_living_creator_is_waited_for_and_the_time_out_names_it(tmp_path, sleeper):
    folder = staged_by(owner_of(sleeper), tmp_path / "hs")
    told = f"process {sleeper.pid} on .* within 0.2 s; give a longer --wait, or remove {folder}"
    with pytest.raises(DataError, match=told):
        create(tmp_path / "hs")
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_what_the_other_one_has_made_is_taken_and_nothing_is_built(tmp_path, sleeper):
    folder, calls = staged_by(owner_of(sleeper), tmp_path / "hs"), []

    def is_there() -> bool:
        calls.append(1)
        if len(calls) == 3:
            folder.rename(tmp_path / "hs")
        return (tmp_path / "hs").exists()

    lines: list[str] = []
    create_once(tmp_path / "hs", is_there, lambda _: pytest.fail("built"), 5, lines.append)
    host = socket.gethostname()
    assert lines == [f"waiting for process {sleeper.pid} on {host} to create {tmp_path / 'hs'}"]
    assert [p.name for p in tmp_path.iterdir()] == ["hs"]


def test_a_creator_that_was_killed_is_replaced_and_its_folder_removed(tmp_path, sleeper):
    owner = owner_of(sleeper)
    staged_by(owner, tmp_path / "hs")
    sleeper.send_signal(signal.SIGKILL)  # not waited for: a zombie is dead, too
    while owner.is_alive(tmp_path):
        pass
    assert create(tmp_path / "hs") == []
    assert [p.name for p in tmp_path.iterdir()] == ["hs"]


def test_a_reused_process_id_is_not_taken_for_the_creator(tmp_path, sleeper):
    owner = owner_of(sleeper)
    staged_by(Owner(owner.host, owner.pid, owner.start + 1), tmp_path / "hs")
    create(tmp_path / "hs")
    assert [p.name for p in tmp_path.iterdir()] == ["hs"]


def test_another_host_counts_as_alive_for_a_day(tmp_path):
    owner = Owner("far-away-7", 1, 1)
    folder = staged_by(owner, tmp_path / "hs")
    with pytest.raises(DataError, match="process 1 on far-away-7"):
        create(tmp_path / "hs", wait=0)
    long_ago = time.time() - 25 * 3600
    for path in (folder / "half", folder):
        os.utime(path, (long_ago, long_ago))
    create(tmp_path / "hs")
    assert [p.name for p in tmp_path.iterdir()] == ["hs"]


@pytest.mark.parametrize("name", ["2024-10-hs", "x.hs", "hs2"])
def test_the_creator_of_a_cache_with_a_similar_name_is_none_of_ours(tmp_path, sleeper, name):
    other = staged_by(owner_of(sleeper), tmp_path / name)
    create(tmp_path / "hs")
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "hs"]


def test_leftovers_go_even_when_the_cache_is_there_already(tmp_path, sleeper):
    create(tmp_path / "hs")
    owner = owner_of(sleeper)
    staged_by(Owner(owner.host, owner.pid, owner.start + 1), tmp_path / "hs")
    create(tmp_path / "hs")
    assert [p.name for p in tmp_path.iterdir()] == ["hs"]


def test_of_two_that_began_together_the_later_name_withdraws(tmp_path, monkeypatch):
    """Another folder appears between our look and our own folder: the first name goes on."""
    first, made, original = Owner("0-sorts-before-any-host", 1, 1), [], creating.uuid.uuid4

    def late():
        if not made:
            made.append(staged_by(first, tmp_path / "hs"))
        return original()

    monkeypatch.setattr(creating.uuid, "uuid4", late)
    with pytest.raises(DataError, match="0-sorts-before-any-host"):
        create_once(
            tmp_path / "hs", lambda: False, lambda _: pytest.fail("built"), 0, lambda _: None
        )
    assert list(tmp_path.iterdir()) == made
