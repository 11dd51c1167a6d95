"""Helpers of the etl tests: a conversion to a fresh store, and comparing trees of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alchemi_xr.etl.conversion import convert
from alchemi_xr.store.reader import Snapshot, open_store


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., tuple[Any, Snapshot]]:
    """Convert to a fresh store; gives the report and the opened store."""

    def run(src: Any, **options: Any) -> tuple[Any, Snapshot]:
        dst = tmp_path / "out.zarr"
        report = convert(src, dst, **options)
        return report, open_store(dst)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a text to an extended XYZ file."""

    def put(text: str, name: str = "in.extxyz") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return put
