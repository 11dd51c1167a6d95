"""``alchemi-xr recommend``: what each profile makes of a sample of your data."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from alchemi_xr.data.block import Block

__all__ = ["register"]

_PROFILES = ("mixed", "raw", "fast", "balanced", "small")
_MIB = 2**20


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("recommend")(recommend)


def recommend(
    source: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="A store, or files that convert reads.")
    ],
    format: Annotated[str | None, typer.Option("--format", help="Source: extxyz, ase-db …")] = None,
    profile: Annotated[
        list[str] | None, typer.Option("--profile", help="Measure this one too, such as lossy:12.")
    ] = None,
    sample: Annotated[str, typer.Option("--sample", help="Bytes to measure with.")] = "32MiB",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to write the samples: measure that disk.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure codecs on a sample of the data: size, write and read speed of each profile."""
    from alchemi_xr.cli.convert import parse_bytes
    from alchemi_xr.store.measure import best, measure

    block = take_sample(source, format=format, max_bytes=parse_bytes(sample))
    profiles = list(dict.fromkeys([*_PROFILES, *(profile or [])]))
    with tempfile.TemporaryDirectory(prefix="alchemi_xr_", dir=folder) as made:
        found = measure(block, profiles, Path(made))
    chosen = best(found)
    if as_json:
        typer.echo(json.dumps(_facts(block, found, chosen.profile), indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"measured with {block.num_samples:,} samples, {block.num_atoms:,} atoms, "
        f"{found[0].raw_bytes / _MIB:.1f} MiB",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("profile")
    for title in ("ratio", "MiB stored", "write MiB/s", "read MiB/s"):
        table.add_column(title, justify="right")
    for entry in found:
        table.add_row(
            entry.profile,
            f"{entry.ratio:.2f}",
            f"{entry.stored_bytes / _MIB:.1f}",
            f"{entry.write_speed / _MIB:,.0f}",
            f"{entry.read_speed / _MIB:,.0f}",
        )
    console.print(table)
    console.print(
        f"recommended: --profile {chosen.profile} (the smallest that reads at half the speed of "
        "the fastest, or better)",
        highlight=False,
        soft_wrap=True,
    )


def _facts(block: Block, found: list[Any], chosen: str) -> dict[str, Any]:
    return {
        "samples": block.num_samples,
        "raw_bytes": found[0].raw_bytes,
        "recommended": chosen,
        "profiles": {
            m.profile: {
                "ratio": m.ratio,
                "stored_bytes": m.stored_bytes,
                "write_bytes_per_s": m.write_speed,
                "read_bytes_per_s": m.read_speed,
            }
            for m in found
        },
    }


def take_sample(sources: list[str], *, format: str | None, max_bytes: int) -> Block:
    """Samples of a store or of files, spread over them, of about so many bytes.

    Raises
    ------
    AlchemiError
        What is given can neither be opened nor converted.
    """
    from alchemi_xr.store import fs

    if len(sources) == 1 and ("://" in sources[0] or fs.looks_like_store(Path(sources[0]))):
        return _of_store(sources[0], max_bytes)
    return _of_files(sources, format, max_bytes)


def _of_store(store: str, max_bytes: int) -> Block:
    import numpy as np

    from alchemi_xr.data.block import Block
    from alchemi_xr.store.reader import open_store

    pieces = 8
    with open_store(store) as snapshot:
        active = snapshot.active
        sizes = snapshot.sample_bytes()[active]
        if sizes.sum() <= max_bytes:
            return snapshot.read_block(active)
        # Runs, since neighbours resemble each other and compress together.
        blocks = []
        for start in np.linspace(0, len(active), pieces, endpoint=False).astype(int):
            within = np.searchsorted(np.cumsum(sizes[start:]), max_bytes // pieces, side="right")
            blocks.append(snapshot.read_block(active[start : start + max(1, int(within))]))
        return Block.concat(blocks)


def _of_files(paths: list[str], format: str | None, max_bytes: int) -> Block:
    import numpy as np

    from alchemi_xr.data.block import Block
    from alchemi_xr.etl.inputs import expand, find_source

    kind, files, _ = find_source(expand(paths), format)
    source = kind(files)
    partitions = source.scan().partitions
    blocks, total = [], 0
    for number in np.random.default_rng(0).permutation(len(partitions)).tolist():
        given = source.read(partitions[number])
        block = getattr(given, "block", given)
        broken = [reject.sample for reject in getattr(given, "rejects", ())]
        block = block.take(np.setdiff1d(np.arange(block.num_samples), broken))
        blocks.append(_head(block, max_bytes - total))
        total += sum(values.nbytes for values in blocks[-1].arrays.values())
        if total >= max_bytes:
            break
    return Block.concat([b for b in blocks if b.num_samples] or blocks)


def _head(block: Block, max_bytes: int) -> Block:
    """The first samples of a block, of about so many bytes."""
    size = sum(values.nbytes for values in block.arrays.values())
    if size <= max_bytes:
        return block
    return block.slice(0, max(1, int(block.num_samples * max_bytes / size)))
