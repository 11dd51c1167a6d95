"""Trajectories of molecular dynamics that MDAnalysis reads: XTC, TRR, DCD, NetCDF, H5MD.

Such files know neither elements nor names: these come from a topology. Every
file is one system, every frame a sample of it, with the time in fs.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from alchemi_xr._optional import import_optional
from alchemi_xr._typing import IntArray, Level, NDArray
from alchemi_xr.data.block import Block
from alchemi_xr.data.csr import counts_to_ptr
from alchemi_xr.errors import ConfigError, OptionalDependencyError, SourceError
from alchemi_xr.etl.elements import SYMBOLS
from alchemi_xr.etl.names import NameMap
from alchemi_xr.etl.schema import FieldObserver, Schema
from alchemi_xr.etl.source import Mapper, Partition, Scan, Segment, no_edges, pack, plain_map
from alchemi_xr.etl.unpacking import own_folder
from alchemi_xr.plan.rejects import Reject
from alchemi_xr.plan.tasks import PartResult

__all__ = ["TrajectorySource"]

_SUFFIXES = (".xtc", ".trr", ".dcd", ".ncdf", ".nc", ".h5md")
# sqrt(amu·Å²/eV) in fs, CODATA 2018: velocities in Å and this time.
_TIME = math.sqrt(1.66053906660e-27 * 1e-20 / 1.602176634e-19) * 1e15
_VELOCITY = 1e-3 * _TIME  # of Å/ps
_FORCE = 1.0 / 96.48533212331  # eV of kJ/mol
# MDAnalysis warns; filters of the warnings module belong to the whole process.
_QUIET = threading.RLock()


class TrajectorySource:
    """Frames of trajectories, through MDAnalysis.

    Parameters
    ----------
    paths : sequence of str
    names : NameMap, optional
    topology : str, optional
        A file that knows the elements of the atoms, in their order: PDB, PSF, GRO, TPR …
    elements : sequence of str, or str, optional
        Their symbols instead; one symbol for all (``"X"``: elements are not known).
    guess : bool
        Take elements from the names of the atoms, where the topology has names only.
    start, stop, step : int, optional
        Which frames.
    partition_bytes : int
    spool : str, optional
        Folder for the indices that MDAnalysis makes of XTC and TRR files.
    """

    name: ClassVar[str] = "trajectory"

    def __init__(
        self,
        paths: Sequence[str],
        *,
        names: NameMap | None = None,
        topology: str | None = None,
        elements: Sequence[str] | str | None = None,
        guess: bool = False,
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        partition_bytes: int = 16 * 2**20,
        spool: str | None = None,
    ) -> None:
        if topology is not None and elements is not None:
            raise ConfigError("topology", "give a topology or elements, not both")
        if step < 1 or start < 0 or (stop is not None and stop < 0):
            raise ConfigError("frames", "start and stop are >= 0, step is >= 1")
        self.paths = [os.fspath(p) for p in paths]
        self.files = [os.path.abspath(p) for p in self.paths]
        self.names = names or NameMap()
        self.topology = None if topology is None else os.path.abspath(os.path.expanduser(topology))
        self.elements = elements
        self.guess = guess
        self.frames = (start, stop, step)
        self.partition_bytes = partition_bytes
        self._spool = spool
        self._numbers: IntArray = np.zeros(0, np.int64)
        self.schema: Schema | None = None

    @classmethod
    def matches(cls, path: str) -> bool:
        """By the suffix."""
        return path.lower().endswith(_SUFFIXES)

    def scan(self, map_files: Mapper = plain_map) -> Scan:
        """Numbers of frames and atoms, and whether there are velocities and forces."""
        if self._spool is None:
            self._spool = own_folder(self)
        notes: list[str] = []
        self._numbers = self._elements(notes)
        # One after the other: each is a look at headers, and MDAnalysis is not for threads.
        observer, rejects, segments = FieldObserver(), [], []
        keys, records, atoms = Counter[str](), 0, []
        for number, shown in enumerate(self.paths):
            try:
                with self._reader(number) as reader:
                    count, frames, fields = self._look(reader, shown)
            except OptionalDependencyError:
                raise
            except SourceError as error:
                rejects.append(Reject(shown, -1, str(error).partition(": ")[2] or str(error)))
                records += 1
                continue
            records += frames
            for name, level, dtype, tail in fields:
                observer.see(name, level, dtype, tail, count=frames)
                keys[name] += frames
            observer.num_samples += frames
            atoms.append(np.full(frames, count, np.int64))
            size = count * 24 * (1 + len([f for f in fields if f[0] in ("velocities", "forces")]))
            per = max(1, self.partition_bytes // max(size, 1))
            for a in range(0, frames, per):
                b = min(a + per, frames)
                segments.append((Segment(number, a, b, a, b - a, count * (b - a)), size * (b - a)))
        self.schema = observer.schema(self.paths[0])
        notes.append(
            "units that the format has, as MDAnalysis converts them: positions Å, time ps, "
            "velocities Å/ps, forces kJ/mol/Å"
        )
        return Scan(
            pack(segments, target_bytes=self.partition_bytes),
            np.concatenate(atoms) if atoms else np.zeros(0, np.int64),
            no_edges(sum(len(a) for a in atoms)),
            self.schema,
            rejects,
            notes,
            dict(keys),
            records,
        )

    def read(self, partition: Partition) -> PartResult:
        """The frames of a partition."""
        if self.schema is None:
            raise SourceError(self.paths[0], "read before scan", mend="call scan() first")
        columns: dict[str, list[NDArray]] = {layout.name: [] for layout in self.schema}
        there: dict[str, list[bool]] = {layout.name: [] for layout in self.schema}
        counts: list[int] = []
        for segment in partition.segments:
            with self._reader(segment.file) as reader:
                for index in range(segment.start, segment.stop):
                    found = self._frame(reader, segment.file, index)
                    count = len(found["positions"])
                    counts.append(count)
                    for layout in self.schema:
                        value = found.get(layout.name)
                        there[layout.name].append(value is not None)
                        if value is None:
                            rows = count if layout.level == "atom" else 1
                            value = np.full((rows, *layout.tail), np.nan)
                        columns[layout.name].append(value)
        ptr = counts_to_ptr(np.array(counts, np.int64))
        arrays, levels, present = {}, {}, {}
        for layout in self.schema:
            mask = np.array(there[layout.name])
            if not mask.any():
                continue
            values = np.concatenate(columns[layout.name])
            arrays[layout.name], levels[layout.name] = values, layout.level
            if not mask.all():
                present[layout.name] = mask
        return PartResult(Block(ptr, np.zeros_like(ptr), arrays, levels, present))

    # -- one file

    @contextmanager
    def _reader(self, number: int) -> Iterator[Any]:
        """The reader of a file; its index, if it makes one, lies in the spool."""
        shown = self.paths[number]
        import_optional("MDAnalysis", extra="md", why=shown)
        from MDAnalysis.core._get_readers import get_reader_for

        folder = os.path.join(self._spool or tempfile.gettempdir(), f"md-{os.getpid()}")
        os.makedirs(folder, exist_ok=True)
        link = os.path.join(folder, f"{number:06d}{os.path.splitext(shown)[1]}")
        with _quietly():
            try:
                if not os.path.lexists(link):
                    os.symlink(self.files[number], link)
                kind = get_reader_for(link)
                reader = kind.__new__(kind)
                # One that fails to begin has nothing to close, and would say so when it goes.
                reader.close = _nothing
                reader.__init__(link)
                del reader.close
            except (OSError, ValueError, TypeError, RuntimeError, EOFError) as error:
                raise SourceError(
                    shown,
                    f"cannot be read ({type(error).__name__}: {error})".replace(link, shown),
                    mend="check that the file is whole",
                ) from error
            try:
                yield reader
            finally:
                reader.close()

    def _look(self, reader: Any, shown: str) -> tuple[int, int, list[Any]]:
        """Atoms, frames and fields of a file."""
        start, stop, step = self.frames
        frames = len(range(*slice(start, stop, step).indices(int(reader.n_frames))))
        count = int(reader.n_atoms)
        if len(self._numbers) not in (1, count):
            raise SourceError(
                shown,
                "the topology (or elements) is of another number of atoms",
                found=f"{count} atoms in the trajectory",
                expected=f"{len(self._numbers)}",
            )
        fields: list[Any] = [
            ("atomic_numbers", "atom", "int64", ()),
            ("positions", "atom", "float32", (3,)),
            ("pbc", "system", "bool", (3,)),
            ("time", "system", "float64", ()),
            ("frame", "system", "int64", ()),
            ("system_id", "system", "int64", (1,)),
        ]
        ts = reader.ts
        for name in ("velocities", "forces"):
            if getattr(ts, f"has_{name}"):
                level: Level = "atom"
                fields.append((name, level, "float32", (3,)))
        if ts.dimensions is not None:
            fields.append(("cell", "system", "float64", (3, 3)))
        return count, frames, fields

    def _frame(self, reader: Any, number: int, index: int) -> dict[str, NDArray]:
        start, _, step = self.frames
        place = start + index * step
        try:
            ts = reader[place]
        except (OSError, IndexError, RuntimeError, ValueError, EOFError) as error:
            raise SourceError(
                f"{self.paths[number]}, frame {place}",
                f"cannot be read ({error})",
                mend="check that the file is whole, and does not change while it is read",
            ) from error
        count = int(ts.n_atoms)
        numbers = self._numbers
        out: dict[str, NDArray] = {
            "atomic_numbers": np.broadcast_to(numbers, count) if len(numbers) == 1 else numbers,
            "positions": np.array(ts.positions, dtype=np.float32),
            "pbc": np.full((1, 3), ts.dimensions is not None),
            # The numbers of a frame in single precision are clean in ps.
            "time": np.array([float(ts.time) * 1e3]),
            "frame": np.array([place], np.int64),
            "system_id": np.array([[number]], np.int64),
        }
        if ts.dimensions is not None:
            out["cell"] = np.array(ts.triclinic_dimensions, dtype=np.float64)[None]
        if ts.has_velocities:
            out["velocities"] = np.asarray(ts.velocities, dtype=np.float32) * np.float32(_VELOCITY)
        if ts.has_forces:
            out["forces"] = np.asarray(ts.forces, dtype=np.float32) * np.float32(_FORCE)
        return out

    # -- elements

    def _elements(self, notes: list[str]) -> IntArray:
        if self.topology is not None:
            return self._of_topology(self.topology, notes)
        if self.elements is None:
            raise SourceError(
                self.paths[0],
                "a trajectory does not know its elements",
                mend="give a topology (--option topology=run.pdb), or elements "
                "(--option elements=X where they are not known)",
            )
        given = [self.elements] if isinstance(self.elements, str) else list(self.elements)
        unknown = [e for e in given if e not in SYMBOLS]
        if unknown or not given:
            raise ConfigError(
                "elements", "not an element", found=unknown[:3], expected="symbols, X for unknown"
            )
        if given == ["X"]:
            notes.append("elements are not known: all atomic numbers are 0")
        return np.array([SYMBOLS.index(e) for e in given], np.int64)

    def _of_topology(self, path: str, notes: list[str]) -> IntArray:
        mda = import_optional("MDAnalysis", extra="md", why=path)
        try:
            with _quietly():
                universe = mda.Universe(path, to_guess=())
                words = list(getattr(universe.atoms, "elements", ()))
                names = list(getattr(universe.atoms, "names", ()))
        except Exception as error:
            # MDAnalysis raises of many kinds, and what is wrong is the file.
            raise SourceError(
                path,
                f"is no topology that MDAnalysis reads ({type(error).__name__}: {error})",
                mend="give a PDB, PSF, GRO, TPR …",
            ) from error
        if not words or not all(str(w).strip() for w in words):
            if not (self.guess and names):
                guess = "guess=true takes them from the names of the atoms; or "
                raise SourceError(
                    path,
                    "the topology has no elements",
                    mend=(guess if names else "")
                    + "give one that has, such as a PDB with columns 77-78",
                )
            words = [_guessed(str(name)) for name in names]
            notes.append(f"elements are guessed from the names of the atoms in {path}")
        out = []
        for i, word in enumerate(words):
            symbol = str(word).strip().capitalize()
            if symbol not in SYMBOLS:
                raise SourceError(path, f"atom {i}: found the unknown element {word!r}")
            out.append(SYMBOLS.index(symbol))
        return np.array(out, np.int64)


def _guessed(name: str) -> str:
    """Element of an atom's name, such as ``CA``, ``1HB2``, ``OW``, ``NA+``."""
    letters = "".join(c for c in name if c.isalpha()).upper()
    charged = name.strip()[-1:] in "+-"
    # Names of biomolecules begin with the element; two letters only for ions and halogens.
    if letters[:2] in ("CL", "BR", "ZN", "FE", "MG", "MN", "CU", "LI") or charged:
        two = letters[:2].capitalize()
        if two in SYMBOLS:
            return two
    return letters[:1]


@contextmanager
def _quietly() -> Iterator[None]:
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _nothing() -> None:
    """In the place of a method that is not to be called."""
