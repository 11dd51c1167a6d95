"""Files that wait to be forced, with several threads at them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from io import FileIO
from pathlib import Path

import pytest

from alchemi_xr.store import fs
from alchemi_xr.store.stage import Stage


class SlowDisk:
    """A disk that is not done with its first file before it may."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self._force = fs.sync_open

    def __call__(self, file: FileIO) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.may.wait()
            if self.error is not None:
                raise self.error
        self._force(file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr(fs, "sync_open", slow)
    yield slow
    slow.may.set()


def test_what_another_thread_forces_has_landed_only_then(tmp_path: Path, disk: SlowDisk) -> None:
    stage = Stage(tmp_path, most_open=1)
    stage.put(tmp_path / "first", [b"1"])
    with ThreadPoolExecutor(2) as pool:
        # One file too many: this thread forces the first.
        other = pool.submit(stage.put, tmp_path / "second", [b"2"])
        assert disk.begun.wait(30)
        landing = pool.submit(stage.land)
        wait([landing], timeout=0.2)
        early = landing.done()
        disk.may.set()
        landing.result()
        other.result()
    assert not early
    assert (tmp_path / "first").read_bytes() == b"1"


def test_what_another_thread_could_not_force_does_not_land(tmp_path: Path, disk: SlowDisk) -> None:
    disk.error = OSError("no room")
    stage = Stage(tmp_path, most_open=1)
    stage.put(tmp_path / "first", [b"1"])
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(stage.put, tmp_path / "second", [b"2"])
        assert disk.begun.wait(30)
        landing = pool.submit(stage.land)
        wait([landing], timeout=0.2)
        disk.may.set()
        with pytest.raises(OSError, match="no room"):
            landing.result()
        with pytest.raises(OSError, match="no room"):
            other.result()
    assert list(tmp_path.iterdir()) == []
