"""Padded batches out of the packed memmap format, for data larger than memory.

A folder holds flat arrays over all atoms and the offsets of the molecules. They
are mapped, and a batch is one call that copies the rows of its molecules into
padded arrays; what is in memory is one offset and two counts a molecule.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import IntArray, NDArray, PathLike
from alchemi_xr.errors import ArgumentTypeError, ConfigError, SourceError, SourceNotFoundError
from alchemi_xr.native.rows import Field, Gather

__all__ = ["PackedMemmapLoader", "split_loader"]

_STATE_VERSION = 1
_Output = Literal["numpy", "torch", "jax"]
_RAW = {"Z_pack": "Z_pack.int32", "R_pack": "R_pack.f32", "F_pack": "F_pack.f32"}


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
        self.offsets, self.n_atoms = _counts(self.path)
        self.N = len(self.n_atoms)
        atoms = int(self.offsets[-1])
        self.Z_pack = _mapped(self.path / _RAW["Z_pack"], "<i4", (atoms,))
        self.R_pack = _mapped(self.path / _RAW["R_pack"], "<f4", (atoms, 3))
        self.F_pack = _mapped(self.path / _RAW["F_pack"], "<f4", (atoms, 3))
        self.E = _mapped(self.path / "E.f64", "<f8", (self.N,))
        self.Qtot = None
        if (self.path / "Qtot.f64").exists():
            self.Qtot = _mapped(self.path / "Qtot.f64", "<f8", (self.N,))
        self.indices: IntArray = np.arange(self.N, dtype=np.int64)
        self._prepare()
        # The state of the generator before the epoch under way, and batches given of it.
        self._before: Any = None
        self._given = 0
        self._skip = 0

    def _prepare(self) -> None:
        plain = [np.asarray(a) for a in (self.Z_pack, self.R_pack, self.F_pack)]
        singles = [np.asarray(a) for a in (self.E, self.n_atoms, self.Qtot) if a is not None]
        self._ragged = Gather([Field(rows, self.offsets) for rows in plain])
        self._single = Gather([Field(rows) for rows in singles])

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
        made = copy.copy(self)  # the maps are shared
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


# -- files -----------------------------------------------------------------------


def _counts(path: Path) -> tuple[IntArray, NDArray]:
    """Offsets and numbers of atoms, checked against each other."""
    offsets, n_atoms = (_array(path / f"{name}.npy") for name in ("offsets", "n_atoms"))
    for name, values in (("offsets", offsets), ("n_atoms", n_atoms)):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise SourceError(
                str(path / f"{name}.npy"),
                "holds no whole numbers along one axis",
                found=f"{values.dtype} {list(values.shape)}",
            )
    if len(offsets) != len(n_atoms) + 1:
        raise SourceError(
            str(path / "offsets.npy"),
            "has not one number more than n_atoms.npy",
            found=len(offsets),
            expected=len(n_atoms) + 1,
        )
    offsets = np.ascontiguousarray(offsets, np.int64)
    if offsets[0] != 0:
        raise SourceError(
            str(path / "offsets.npy"), "does not begin at 0", found=int(offsets[0]), expected=0
        )
    wrong = np.flatnonzero((np.diff(offsets) != n_atoms) | (n_atoms < 0))
    if len(wrong):
        first = int(wrong[0])
        raise SourceError(
            f"{path}, molecule {first}",
            "offsets.npy and n_atoms.npy contradict each other",
            found=f"offsets {offsets[first]} to {offsets[first + 1]}",
            expected=f"{int(n_atoms[first])} atoms",
            mend="write the folder anew",
        )
    return offsets, np.ascontiguousarray(n_atoms, np.int32)


def _array(path: Path) -> NDArray:
    try:
        values: NDArray = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise _missing(path) from None
    except (ValueError, EOFError, OSError) as error:
        raise SourceError(str(path), f"is no array of NumPy ({error})") from error
    return values


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray:
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        raise _missing(path) from None
    if size != expected:
        raise SourceError(
            str(path),
            f"{path.stem} size mismatch: expected {expected} bytes, got {size} bytes",
            mend="copy the file again, or write the folder anew",
        )
    if size == 0:
        return np.empty(shape, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _missing(path: Path) -> SourceNotFoundError:
    if not path.parent.is_dir():
        return SourceNotFoundError(str(path.parent), "no such folder of packed molecules")
    return SourceNotFoundError(
        str(path.parent),
        f"{path.name} is missing",
        expected=["offsets.npy", "n_atoms.npy", *_RAW.values(), "E.f64"],
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
