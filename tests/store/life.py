"""A store's life of seeded steps, for a process that is killed in the middle of it.

Run as a script this is a process that forks one child a command: the imports
are paid once for hundreds of kills. The test loads it as a module and replays
the same steps on a plain list.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

CONFIG = {"profile": "fast", "core": {"chunk_size": 16}, "meta": {"chunk_size": 16}}
STEPS = (
    *("append", "append", "append", "delete", "delete"),
    *("add_custom", "add_custom", "defragment", "merge", "merge"),
)
#: The samples of the other store that a merge takes beside those of this one.
OTHER = list(range(5, 17))


@dataclass
class Model:
    """What the store has to hold: a number a sample, from which all its values follow."""

    ids: list[int] = field(default_factory=list)
    alive: list[bool] = field(default_factory=list)
    customs: list[str] = field(default_factory=list)
    merged: tuple[int, ...] | None = None

    def copy(self) -> Model:
        return Model(list(self.ids), list(self.alive), list(self.customs), self.merged)


def other_of(path) -> Path:
    return Path(path).with_name("other.zarr")


def merged_of(path) -> Path:
    return Path(path).with_name("merged.zarr")


def block_of(ids):
    from alchemi_xr.data.block import Block

    counts = [i % 4 + 1 for i in ids]
    ptr = np.concatenate(([0], np.cumsum(counts)))
    owner = np.repeat(ids, counts)
    local = np.arange(ptr[-1]) - np.repeat(ptr[:-1], counts)
    arrays = {
        "atomic_numbers": owner % 90 + 1,
        "positions": (owner[:, None] + local[:, None] / 8 + np.arange(3) / 64).astype(float),
        "energy": np.array(ids, dtype=float)[:, None],
    }
    levels = {"atomic_numbers": "atom", "positions": "atom", "energy": "system"}
    return Block(ptr, np.zeros(len(ids) + 1, np.int64), arrays, levels)


def begins_with_field(seed: int, number: int) -> bool:
    """Whether this step adds a field whatever was drawn: a kill meets one too seldom by chance."""
    return number == 0 and seed % 20 == 5


def step(model: Model, seed: int, number: int, writer=None, path=None) -> str:
    """One step on the model, and on the store where there is a writer; its name."""
    rng = random.Random(f"{seed}-{number}")
    name = "add_custom" if begins_with_field(seed, number) else rng.choice(STEPS)
    if len(model.ids) > 120 and name == "append":
        name = "defragment"
    if name == "append":
        first = seed * 100_000 + number * 100
        ids = list(range(first, first + rng.choice((1, 1, 3, 20))))
        if writer:
            writer.append(block_of(ids))
        # A field of ours has holes for samples that come after it.
        model.ids += ids
        model.alive += [True] * len(ids)
    elif name == "delete":
        at = rng.sample(range(len(model.ids)), min(len(model.ids), rng.choice((1, 5, 30))))
        if sum(model.alive) - len(at) < 5:
            at = []
        if writer:
            writer.delete(at)
        for i in at:
            model.alive[i] = False
    elif name == "add_custom":
        custom = f"tag_{seed}_{number}"
        if len(model.customs) > 2 + seed // 16 and not begins_with_field(seed, number):
            return "nothing"
        if writer:
            writer.add_custom(custom, np.array(model.ids, dtype=float), "system")
        model.customs.append(custom)
    elif name == "merge":
        if writer:
            from alchemi_xr.etl import merge

            # In the place of the last one, which stays whole until this one is.
            merge(
                [path, other_of(path)],
                merged_of(path),
                config=CONFIG,
                overwrite=True,
                threads=1,
                progress=False,
            )
        kept = [i for i, alive in zip(model.ids, model.alive, strict=True) if alive]
        model.merged = (*kept, *OTHER)
    else:
        if writer:
            writer.defragment()
        model.ids = [i for i, kept in zip(model.ids, model.alive, strict=True) if kept]
        model.alive = [True] * len(model.ids)
    return name


def differences(path, model: Model, *, merged: bool = True) -> str:
    """What of the store is not as the model says; empty when all is."""
    from alchemi_xr.errors import NotAStoreError, StoreNotFoundError
    from alchemi_xr.store import open_store

    with open_store(path) as snapshot:
        found = snapshot.read_block(slice(None))
        if found["energy"][:, 0].tolist() != [float(i) for i in model.ids]:
            return "other samples"
        if snapshot.samples_mask.tolist() != model.alive:
            return "other deletions"
        customs = [n for n in found.names if n.startswith("tag_")]
        if sorted(customs) != sorted(model.customs):
            return f"fields {customs}"
        wanted = block_of(model.ids)
        for name in wanted.names:
            if not np.array_equal(found[name], wanted[name]):
                return f"other values of {name}"
        for name in customs:
            has = found.has(name)
            if not np.array_equal(found[name][has], found["energy"][has, 0]):
                return f"other values of {name}"
    if not merged:
        return ""
    try:
        # Opening it, not looking for it: between two renames it has another name.
        snapshot = open_store(merged_of(path))
    except (StoreNotFoundError, NotAStoreError):
        return "" if model.merged is None else "no merged store"
    with snapshot:
        if model.merged is None:
            return "a merged store"
        found = snapshot.read_block(slice(None))
        wanted = block_of(list(model.merged))
        if not all(
            found[name].shape == wanted[name].shape and (found[name] == wanted[name]).all()
            for name in wanted.names
        ):
            return "another merged store"
    return ""


def live(path: str, seed: int, mode: str, log: int) -> None:
    """Do steps until killed, and say of each when it begins and when it is committed."""
    from alchemi_xr.store import StoreWriter, fs, open_store

    if mode != "exchange":
        fs.exchange = lambda first, second: False
    if mode == "between":
        aside = fs._put_aside

        def die(*arguments):
            aside(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        fs._put_aside = die
    with open_store(path) as snapshot:
        known = snapshot.read_block(slice(None))
        model = Model(
            [int(e) for e in known["energy"][:, 0]],
            snapshot.samples_mask.tolist(),
            [n for n in known.names if n.startswith("tag_")],
        )
    writer = StoreWriter(path)
    for number in range(10_000):
        os.write(log, f"begin {number}\n".encode())
        step(model, seed, number, writer, path)
        os.write(log, f"done {number}\n".encode())


def main() -> None:
    import alchemi_xr.etl.maintain
    import alchemi_xr.store.reader
    import alchemi_xr.store.writer  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        path, seed, mode, log = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                live(path, int(seed), mode, fd)
            except BaseException as error:
                os.write(fd, f"error {error!r}\n".encode())
            os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
