"""What a look at each file of an input found, and all of them as one scan."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alchemi_xr.etl.records import Record
from alchemi_xr.etl.schema import FieldObserver
from alchemi_xr.etl.source import MOST_SAMPLES, Scan, Segment, no_edges, pack
from alchemi_xr.plan.rejects import Reject

__all__ = ["FileScan", "joined"]


@dataclass
class FileScan:
    """One file.

    Parameters
    ----------
    observer : FieldObserver
    segments : list of (Segment, int)
        With their sizes.
    atoms : array of int
        Of each good record.
    rejects : list of Reject
    notes : list of str
    keys, unstored : Counter
        By name in the input: records that have it, and of which it is not stored.
    records : int
    """

    observer: FieldObserver = field(default_factory=FieldObserver)
    segments: list[tuple[Segment, int]] = field(default_factory=list)
    atoms: array[int] = field(default_factory=lambda: array("q"))
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    keys: Counter[str] = field(default_factory=Counter)
    unstored: Counter[str] = field(default_factory=Counter)
    records: int = 0

    def take(self, record: Record, keys: Iterable[str]) -> None:
        """Count in a good record and the keys that it has in the input."""
        record.observe(self.observer)
        self.keys.update(keys)
        self.unstored.update(record.unstored)
        self.atoms.append(record.atoms)

    def extend(
        self, one: Segment, size: int, *, most: int | None = None, limit: int | None = None
    ) -> None:
        """Put a record behind the last segment that it follows, or begin a new one.

        Parameters
        ----------
        one : Segment
            Of one record.
        size : int
        most, limit : int, optional
            Records of a segment, and its size.
        """
        if self.segments:
            last, nbytes = self.segments[-1]
            follows = one.first == last.first + last.frames
            room = (most is None or last.frames < most) and (
                limit is None or nbytes + size <= limit
            )
            if follows and room:
                grown = replace(
                    last, stop=one.stop, frames=last.frames + 1, atoms=last.atoms + one.atoms
                )
                self.segments[-1] = (grown, nbytes + size)
                return
        self.segments.append((one, size))

    def extend_all(
        self, file: int, ones: Sequence[tuple[int, int, int, int]], weight: int, most: int
    ) -> None:
        """Put many records behind the last segment, as :meth:`extend` would one by one.

        Parameters
        ----------
        file : int
        ones : sequence of (first, start, stop, atoms)
            Of each record its place in the file, its range and its atoms.
        weight : int
            Of an atom.
        most : int
            Records of a segment.
        """
        at = 0
        while at < len(ones):
            first, start, _, _ = ones[at]
            last, size = self.segments[-1] if self.segments else (None, 0)
            if last is None or first != last.first + last.frames or last.frames >= most:
                last, size = Segment(file, start, start, first, 0, 0), 0
            else:
                self.segments.pop()
            end = min(len(ones), at + most - last.frames)
            stop = next((k for k in range(at, end) if ones[k][0] != first + k - at), end)
            atoms = sum(one[3] for one in ones[at:stop])
            grown = replace(
                last,
                stop=ones[stop - 1][2],
                frames=last.frames + stop - at,
                atoms=last.atoms + atoms,
            )
            self.segments.append((grown, size + atoms * weight))
            at = stop


def joined(
    results: Sequence[FileScan],
    where: str,
    *,
    unstored: str,
    target_bytes: int,
    target_samples: int = MOST_SAMPLES,
    damage: Sequence[Reject] = (),
) -> Scan:
    """The scan of all files.

    Parameters
    ----------
    results : sequence of FileScan
        In the order of the files.
    where : str
        For messages.
    unstored : str
        Note on a name that is not stored, with ``{name!r}`` and ``{count}``.
    target_bytes, target_samples : int
        Of a partition.
    damage : sequence of Reject
        What was found before; what is cut off by it is found by the scan too.
    """
    observer, keys, missing = FieldObserver(), Counter[str](), Counter[str]()
    for result in results:
        observer.merge(result.observer)
        keys.update(result.keys)
        missing.update(result.unstored)
    schema = observer.schema(where)
    notes = [unstored.format(name=name, count=count) for name, count in sorted(missing.items())]
    notes += [f"{name!r} is not stored: {why}" for name, why in schema.dropped.items()]
    atoms = np.concatenate([np.frombuffer(r.atoms, dtype=np.int64) for r in results])
    return Scan(
        pack(
            (s for r in results for s in r.segments),
            target_bytes=target_bytes,
            target_samples=target_samples,
        ),
        atoms,
        no_edges(len(atoms)),
        schema,
        [*damage, *(reject for result in results for reject in result.rejects)],
        notes,
        dict(keys),
        sum(result.records for result in results) + len(damage),
    )
