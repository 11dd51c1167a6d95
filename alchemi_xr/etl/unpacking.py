"""Compressed inputs, unpacked into a folder, so that a task can begin anywhere in them."""

from __future__ import annotations

import bz2
import gzip
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from alchemi_xr._optional import import_optional
from alchemi_xr.plan.rejects import Reject

__all__ = ["PACKED", "own_folder", "unpack"]


def _blocks_of(open_packed: Callable[..., Any]) -> Callable[[str], Iterator[bytes]]:
    def blocks(path: str) -> Iterator[bytes]:
        with open_packed(path, "rb") as packed:
            # ``read`` would lose what it has when it meets the damage.
            while block := packed.read1(2**20):
                yield block

    return blocks


def _zstd_blocks(path: str) -> Iterator[bytes]:
    """Blocks of a zstd file, of all its frames; EOFError where the last is cut off."""
    zstandard = import_optional("zstandard", extra="etl", why=path)
    part = zstandard.ZstdDecompressor().decompressobj()
    begun = False
    with open(path, "rb") as packed:
        while block := packed.read(2**18):
            while block:
                begun = True
                try:
                    yield part.decompress(block)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                block = b""
                if part.eof:
                    block = part.unused_data
                    part, begun = zstandard.ZstdDecompressor().decompressobj(), False
    if begun:
        raise EOFError("the file ends inside a frame")


PACKED: dict[str, Callable[[str], Iterator[bytes]]] = {
    ".gz": _blocks_of(gzip.open),
    ".bz2": _blocks_of(bz2.open),
    ".zst": _zstd_blocks,
}
"""Blocks of the unpacked bytes of a file, by its suffix."""


def unpack(path: str, target: str) -> list[Reject]:
    """Write the unpacked bytes of a file of :data:`PACKED`; of a damaged one, those before it.

    Parameters
    ----------
    path, target : str
        The target appears when it is whole.

    Returns
    -------
    list of Reject
        The damage, if there is any.
    """
    faults: list[Reject] = []
    with open(target + ".partial", "wb") as out:
        try:
            for block in PACKED[os.path.splitext(path)[1].lower()](path):
                out.write(block)
        except (OSError, EOFError, zlib.error) as error:
            reason = f"the compressed data are damaged after byte {out.tell()}: {error}"
            faults.append(Reject(path, -1, reason))
    os.replace(target + ".partial", target)
    return faults


def own_folder(owner: object) -> str:
    """A temporary folder that goes when its owner does, in the process that made it."""
    folder = tempfile.mkdtemp(prefix="alchemi_xr-")
    weakref.finalize(owner, _remove, folder, os.getpid())
    return folder


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
