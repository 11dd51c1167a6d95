"""Conversions whose destination is no path of this machine.

An object store cannot rename, so the store is built in a temporary folder, in
the way of every conversion, and then copied to its place, root document last:
readers there see nothing, then the whole store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alchemi_xr.errors import ConfigError
from alchemi_xr.etl.report import ConvertReport
from alchemi_xr.plan.rejects import Quarantine
from alchemi_xr.store.copying import check_free, copy_store
from alchemi_xr.store.locate import locate
from alchemi_xr.store.remote import scheme_of

__all__ = ["convert_elsewhere", "is_elsewhere"]


def is_elsewhere(dst: Any) -> bool:
    """Whether a destination is a URL of another place than this machine's files.

    Examples
    --------
    >>> is_elsewhere("s3://bucket/a.zarr"), is_elsewhere("icechunk:repo"), is_elsewhere("a.zarr")
    (True, True, False)
    """
    if not isinstance(dst, str):
        return False
    scheme = scheme_of(dst) if "://" in dst else None
    return dst.startswith("icechunk:") or scheme not in (None, "file", "local")


def convert_elsewhere(
    convert: Callable[..., ConvertReport],
    src: Any,
    dst: str,
    *,
    overwrite: bool,
    storage_options: dict[str, Any] | None,
    **options: Any,
) -> ConvertReport:
    """Convert into a temporary folder (of ``TMPDIR``), then copy.

    Raises
    ------
    StoreExistsError
        Something is at ``dst``; said before anything is converted.
    ConfigError
        ``overwrite`` was asked for.
    """
    if overwrite:
        raise ConfigError(
            dst,
            "overwrite=True replaces a store at a path; elsewhere it cannot be replaced in one step",
            mend="convert to a place where nothing is",
        )
    place = locate(dst, storage_options=storage_options)
    if place.repository is not None:
        place.repository.create()
    check_free(place, overwrite=False)
    with tempfile.TemporaryDirectory(prefix="alchemi_xr-") as folder:
        name = dst.rstrip("/").rpartition("/")[2].removeprefix("icechunk:")
        built = Path(folder) / name
        report = convert(src, built, **options)
        copy_store(built, place)
    report.destination = dst
    if report.rejects_path is not None:
        # It went with the temporary folder, and an object store is no place to look for it.
        report.rejects_path = os.path.abspath(f"{name}.rejects.jsonl")
        Quarantine(report.rejects_path).write(report.rejects)
    return report
