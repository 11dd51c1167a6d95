"""Padded batches out of the packed memmap format, for data larger than memory.

A folder holds flat arrays over all atoms and the offsets of the molecules. They
are mapped, and a batch is one call that copies the rows of its molecules into
padded arrays; what is in memory is one offset and two counts a molecule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import IntArray, NDArray, PathLike
from alchemi_xr.data.packed import PackedFiles, open_packed
from alchemi_xr.errors import ArgumentTypeError, ConfigError, SourceError
from alchemi_xr.native.rows import Field, Gather

__all__ = ["PackedMemmapLoader", "split_loader"]

_STATE_VERSION = 1
_Output = Literal["numpy", "torch", "jax"]
#: Attributes that come out of the files.
_MAPPED = frozenset(
    ["offsets", "n_atoms", "N", "Z_pack", "R_pack", "F_pack", "E", "Qtot", "_ragged", "_single"]
)


class PackedMemmapLoader:
    """Batches of molecules of like size, padded to one number of atoms.

    Parameters
    ----------
    path : path
        Folder with ``offsets.npy`` (N+1,), ``n_atoms.npy`` (N,), ``Z_pack.int32``
        (A,), ``R_pack.f32`` and ``F_pack.f32`` (A, 3), ``E.f64`` (N,) and, where
        there are charges, ``Qtot.f64`` (N,). The files name no units.
    batch_size : int
    shuffle : bool
        A new order in each epoch; epochs go on with one generator.
    bucket_size : int
        Molecules that are sorted by size together: a batch is padded little, and
        the order stays random beyond a bucket.
    seed : int
    output : {"numpy", "torch", "jax"}
        What the arrays of a batch are. With JAX, float64 needs its x64 mode.

    Attributes
    ----------
    N : int
        Molecules in the files.
    indices : int64 array
        Those that this loader gives; all of them, or a part of a split.
    offsets, n_atoms : int64 array [N + 1], int32 array [N]
    Z_pack, R_pack, F_pack, E, Qtot : memmap
        ``Qtot`` is None where there is no file.

    Raises
    ------
    SourceNotFoundError
        The folder or one of its files is not there.
    SourceError
        A file has not the size that the offsets ask for, or offsets and counts
        contradict each other.
    ConfigError, ArgumentTypeError

    Examples
    --------
    >>> loader = PackedMemmapLoader("packed", batch_size=32)  # doctest: +SKIP
    >>> for batch in loader.batches(num_atoms=60):  # doctest: +SKIP
    ...     batch["R"].shape
    (32, 60, 3)
    """

    def __init__(
        self,
        path: PathLike,
        batch_size: int,
        shuffle: bool = True,
        bucket_size: int = 8192,
        seed: int | None = 0,
        *,
        output: _Output = "numpy",
    ) -> None:
        for name, value in (("batch_size", batch_size), ("bucket_size", bucket_size)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ArgumentTypeError(
                    "PackedMemmapLoader", f"{name} is no whole number", found=repr(value)[:60]
                )
            if value < 1:
                raise ConfigError(
                    "PackedMemmapLoader", f"{name} is too small", found=value, expected=">= 1"
                )
        if output not in ("numpy", "torch", "jax"):
            raise ConfigError(
                "PackedMemmapLoader",
                "output is not known",
                found=repr(output),
                expected="'numpy', 'torch' or 'jax'",
            )
        self.path = Path(path)
        self.batch_size, self.bucket_size = int(batch_size), int(bucket_size)
        self.shuffle, self.seed, self.output = shuffle, seed, output
        self.rng = np.random.default_rng(seed)
        _convert(output)  # a package that is missing is told now
        self._take(open_packed(self.path))
        self.indices: IntArray = np.arange(self.N, dtype=np.int64)
        # The state of the generator before the epoch under way, and batches given of it.
        self._before: Any = None
        self._given = 0
        self._skip = 0

    def _take(self, files: PackedFiles) -> None:
        self._files = files
        self.offsets, self.n_atoms, self.N = files.offsets, files.n_atoms, len(files.n_atoms)
        self.Z_pack, self.R_pack, self.F_pack = (files.arrays[name] for name in "ZRF")
        self.E, self.Qtot = files.arrays["E"], files.arrays.get("Qtot")
        plain = [np.asarray(a) for a in (self.Z_pack, self.R_pack, self.F_pack)]
        singles = [np.asarray(a) for a in (self.E, self.n_atoms, self.Qtot) if a is not None]
        self._ragged = Gather([Field(rows, self.offsets) for rows in plain])
        self._single = Gather([Field(rows) for rows in singles])

    def __getstate__(self) -> dict[str, Any]:
        # Without the maps, which would carry the whole data.
        return {k: v for k, v in self.__dict__.items() if k not in _MAPPED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take(self._files)

    def __len__(self) -> int:
        """Number of molecules."""
        return len(self.indices)

    # -- batches ---------------------------------------------------------------

    def batches(
        self, num_atoms: int | None = None, physnet_format: bool = True
    ) -> Iterator[dict[str, Any]]:
        """The batches of one epoch.

        Parameters
        ----------
        num_atoms : int, optional
            Atoms that all are padded to; by default the most of each batch.
        physnet_format : bool
            Add ``dst_idx`` and ``src_idx``, all pairs of one padded molecule, and
            ``batch_segments``, the molecule of each atom; else ``mask``, true for
            atoms that are there.

        Yields
        ------
        dict
            ``Z`` (B, A) int32, ``R`` and ``F`` (B, A, 3) float32, ``E`` (B,) float64,
            ``N`` (B,) int32, ``Qtot`` (B,) float64, 0 behind the atoms of a molecule;
            and the indices named above.

        Raises
        ------
        SourceError
            A molecule has more than ``num_atoms`` atoms; told before the first batch.
        """
        if num_atoms is not None:
            num_atoms = self._padding(num_atoms)
        self._before = copy.deepcopy(self.rng.bit_generator.state)
        plan, self._given = self._plan(), self._skip
        self._skip = 0
        return self._iterate(plan, num_atoms, physnet_format)

    def _padding(self, num_atoms: int) -> int:
        if isinstance(num_atoms, bool) or not isinstance(num_atoms, (int, np.integer)):
            raise ArgumentTypeError(
                "PackedMemmapLoader", "num_atoms is no whole number", found=repr(num_atoms)[:60]
            )
        if num_atoms < 1:
            raise ConfigError(
                "PackedMemmapLoader", "num_atoms is too small", found=num_atoms, expected=">= 1"
            )
        counts = self.n_atoms[self.indices]
        if len(counts) and counts.max() > num_atoms:
            worst = int(self.indices[int(np.argmax(counts))])
            raise SourceError(
                f"{self.path}, molecule {worst}",
                f"has more atoms than num_atoms={num_atoms}",
                found=int(self.n_atoms[worst]),
                mend="raise num_atoms, or leave it out: batches are then padded to their largest",
            )
        return int(num_atoms)

    def _plan(self) -> tuple[IntArray, list[int]]:
        """The order of an epoch, and the bounds of its batches."""
        order = self.indices.copy()
        if self.shuffle:
            self.rng.shuffle(order)
        bounds = [0]
        for start in range(0, len(order), self.bucket_size):
            bucket = order[start : start + self.bucket_size]
            bucket[:] = bucket[np.argsort(self.n_atoms[bucket], kind="stable")]
            stop = start + len(bucket)
            bounds += [*range(start + self.batch_size, stop, self.batch_size), stop]
        return order, bounds

    def _iterate(
        self, plan: tuple[IntArray, list[int]], num_atoms: int | None, physnet_format: bool
    ) -> Iterator[dict[str, Any]]:
        order, bounds = plan
        convert = _convert(self.output)
        for number in range(self._given, len(bounds) - 1):
            chosen = order[bounds[number] : bounds[number + 1]]
            batch = self._batch(chosen, num_atoms, physnet_format)
            self._given = number + 1
            yield {name: convert(values) for name, values in batch.items()}
        self._before, self._given = None, 0

    def _batch(
        self, chosen: IntArray, num_atoms: int | None, physnet_format: bool
    ) -> dict[str, NDArray]:
        size = len(chosen)
        energies, counts, *charges = self._single(chosen, [size] * len(self._single.fields))
        most = int(counts.max()) if num_atoms is None else num_atoms
        numbers, positions, forces = self._ragged(chosen, [size * most] * 3, slot=most)
        batch = {
            "Z": numbers.reshape(size, most),
            "R": positions.reshape(size, most, 3),
            "F": forces.reshape(size, most, 3),
            "E": energies,
            "N": counts,
            "Qtot": charges[0] if charges else np.zeros(size),
        }
        if physnet_format:
            batch["dst_idx"], batch["src_idx"] = _all_pairs(most)
            batch["batch_segments"] = np.repeat(np.arange(size, dtype=np.int32), most)
        else:
            batch["mask"] = np.arange(most) < counts[:, None]
        return batch

    # -- where it stands -------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, as plain values.

        In the middle of an epoch, that is after the last batch given; between two,
        the beginning of the next.
        """
        under_way = self._before is not None
        state = self._before if under_way else self.rng.bit_generator.state
        return {
            "version": _STATE_VERSION,
            "rng": copy.deepcopy(state),
            "step": self._given if under_way else self._skip,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with the next call of ``batches``.

        Raises
        ------
        ConfigError
            The state is of a loader with another order.
        """
        mine = {"version": _STATE_VERSION, **self._identity()}
        for name, value in mine.items():
            if state.get(name) != value:
                raise ConfigError(
                    "PackedMemmapLoader",
                    f"the state is of a loader with another {name}",
                    found=state.get(name),
                    expected=value,
                )
        self.rng.bit_generator.state = copy.deepcopy(state["rng"])
        self._before, self._given, self._skip = None, 0, int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "molecules": len(self),
            "batch_size": self.batch_size,
            "bucket_size": self.bucket_size,
            "shuffle": self.shuffle,
        }

    def __repr__(self) -> str:
        return f"PackedMemmapLoader({str(self.path)!r}, {len(self)} of {self.N} molecules)"

    def _part(self, indices: IntArray, *, shuffle: bool, seed: int) -> PackedMemmapLoader:
        made = PackedMemmapLoader.__new__(PackedMemmapLoader)
        made.__dict__.update(self.__dict__)  # the maps are shared
        made.indices, made.shuffle, made.seed = indices, shuffle, seed
        made.rng = np.random.default_rng(seed)
        made._before, made._given, made._skip = None, 0, 0
        return made


def split_loader(
    loader: PackedMemmapLoader, train_fraction: float = 0.9, seed: int | None = None
) -> tuple[PackedMemmapLoader, PackedMemmapLoader]:
    """Two loaders over disjoint parts of one, training and validation.

    Parameters
    ----------
    loader : PackedMemmapLoader
        Also one that came out of a split. Its generator gives the seeds of the
        two, and so goes on.
    train_fraction : float
        The first part has ``int(len(loader) * train_fraction)`` molecules.
    seed : int, optional
        Of a random choice; by default the first ones in their order.

    Returns
    -------
    train, valid : PackedMemmapLoader
        ``train`` shuffles as the loader did, ``valid`` does not.

    Raises
    ------
    ConfigError
        ``train_fraction`` is not between 0 and 1.
    """
    if not 0 <= train_fraction <= 1:
        raise ConfigError(
            "split_loader", "train_fraction is no fraction", found=train_fraction, expected="0 to 1"
        )
    indices = loader.indices
    if seed is not None:
        indices = indices[np.random.default_rng(seed).permutation(len(indices))]
    count = int(len(indices) * train_fraction)
    seeds = loader.rng.integers(0, 2**31 - 1, 2).tolist()
    return (
        loader._part(indices[:count].copy(), shuffle=loader.shuffle, seed=seeds[0]),
        loader._part(indices[count:].copy(), shuffle=False, seed=seeds[1]),
    )


def _all_pairs(num_atoms: int) -> tuple[NDArray, NDArray]:
    """All ordered pairs of different atoms of one molecule: targets and sources, row by row."""
    target = np.repeat(np.arange(num_atoms, dtype=np.int32), max(0, num_atoms - 1))
    source = np.tile(np.arange(num_atoms, dtype=np.int32), (num_atoms, 1))
    return target, source[~np.eye(num_atoms, dtype=bool)]


def _convert(output: str) -> Any:
    if output == "torch":
        import torch

        return torch.from_numpy
    if output == "jax":
        return import_optional("jax.numpy", extra="jax", why="output='jax'").asarray
    return lambda values: values
