"""From what the user names to files and the source that reads them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from typing import Any

from alchemi_xr._typing import PathLike
from alchemi_xr.errors import ArgumentTypeError, ConfigError, SourceError, SourceNotFoundError
from alchemi_xr.registry import sources

__all__ = ["content_files", "expand", "find_source"]


def expand(src: PathLike | Sequence[PathLike]) -> list[str]:
    """All input files: globs and folders opened, in a fixed order.

    Raises
    ------
    SourceNotFoundError
        A path or pattern stands for nothing.
    SourceError
        A path is no regular file, or a folder may not be read.
    """
    given: list[Any]
    if isinstance(src, (str, bytes, os.PathLike)) or not isinstance(src, Iterable):
        given = [src]
    else:
        given = list(src)
    if not given:
        raise SourceNotFoundError("convert", "no input was named", mend="name at least one file")
    paths: list[str] = []
    for item in given:
        if not isinstance(item, (str, os.PathLike)):
            raise ArgumentTypeError(
                "convert",
                "an input is a path, a pattern, or a list of them",
                found=type(item).__name__,
                mend="give the name of a file",
            )
        path = os.path.expanduser(os.fspath(item))
        if os.path.isdir(path) and _is_input(path):
            paths.append(path)
        elif os.path.isdir(path):
            try:
                names = os.listdir(path)
            except OSError as error:
                raise SourceError(
                    path, f"the folder cannot be read ({error.strerror})", mend="check its rights"
                ) from error
            inside = sorted(os.path.join(path, name) for name in names if name[:1] != ".")
            files = [p for p in inside if os.path.isfile(p) or _is_input(p)]
            if not files:
                raise SourceNotFoundError(path, "the folder holds no file")
            paths += files
        elif os.path.isfile(path):
            paths.append(path)
        elif os.path.exists(path):
            # A scan and a reading need the bytes twice; a pipe gives them once, or waits.
            raise SourceError(
                path, "is no regular file", mend="write what it gives to a file, then convert that"
            )
        else:
            found = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
            found = [p for p in found if os.path.isfile(p) or _is_input(p)]
            if not found:
                raise SourceNotFoundError(
                    path,
                    "does not exist" if not glob.has_magic(path) else "no file matches",
                    mend="check the path; patterns need a match",
                )
            paths += found
    return paths


def _is_input(path: str) -> bool:
    """Whether a folder is one input of some source (a DeePMD system, a store)."""
    if not os.path.isdir(path):
        return False
    kinds = (sources.get(name) for name in sources.names())
    return any(getattr(kind, "takes_folders", False) and kind.matches(path) for kind in kinds)


def content_files(path: str) -> list[str]:
    """The files that an input consists of: itself, or all below a folder."""
    if not os.path.isdir(path):
        return [path]
    return sorted(os.path.join(top, name) for top, _, names in os.walk(path) for name in names)


def find_source(
    paths: Sequence[str], format: str | None = None, *, strict: bool = True
) -> tuple[type[Any], list[str], list[tuple[str, str]]]:
    """The class that reads these files, those it reads, and the others with the reason.

    Parameters
    ----------
    paths : sequence of str
    format : str, optional
        Name of a source, which then gets all files.
    strict : bool
        A file that no source knows is an error; else it is among the others,
        unless no file at all is known.

    Raises
    ------
    ConfigError
        The format is not known, or the files are of several formats.
    SourceError
        No source knows a file; the message names the extra that would.
    """
    if format is not None:
        return sources.get(format), list(paths), []
    first: tuple[str, str] | None = None
    chosen: type[Any] | None = None
    taken: list[str] = []
    others: list[tuple[str, str]] = []
    for path in paths:
        match = _match(path)
        if match is None:
            if strict or len(paths) == 1:
                raise _unknown(path)
            others.append((path, "no source knows this format"))
            continue
        name, source = match
        if first is None:
            first, chosen = (path, name), source
        elif source is not chosen:
            raise ConfigError(
                "convert",
                "the inputs are of two formats",
                found=f"{first[1]} ({first[0]}) and {name} ({path})",
                mend="convert one format at a time, append the second, or give format=",
            )
        taken.append(path)
    if chosen is None:
        raise _unknown(paths[0])
    return chosen, taken, others


def _match(path: str) -> tuple[str, type[Any]] | None:
    for name in sources.names():
        source = sources.get(name)
        if source.matches(path):
            return name, source
    return None


def _unknown(path: str) -> SourceError:
    names = ", ".join(sources.names())
    return SourceError(
        path,
        "no source knows this format",
        mend=f"give format= (--format), one of: {names}; or install a package that adds a source "
        "(entry-point group alchemi_xr.sources)",
    )
