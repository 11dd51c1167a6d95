"""Any format that ASE writes: its trajectory, and single systems (CIF, POSCAR …)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

from alchemi_xr.data.block import Block
from alchemi_xr.errors import ConfigError
from alchemi_xr.etl.ase_atoms import ase_limits, iter_samples
from alchemi_xr.store.reader import Snapshot

__all__ = ["AseExport"]


_KEPT = (
    "atomic_numbers",
    "positions",
    "forces",
    "charges",
    "momenta",
    "atomic_masses",
    "tags",
    "initial_magmoms",
    "initial_charges",
)


class AseExport:
    """A file that ``ase.io.write`` makes, frame by frame where the format is ASE's own.

    Parameters
    ----------
    ase_format : str
        ASE's name of the format; by default ``traj``.
    """

    name: ClassVar[str] = "ase"
    suffixes: ClassVar[tuple[str, ...]] = (".traj",)

    def __init__(self, *, ase_format: str = "traj") -> None:
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self.ase_format = ase_format
        self._trajectory: Any = None
        self._atoms: Any = None

    @classmethod
    def owns(cls, path: str) -> bool:
        """A folder never is."""
        return False

    @staticmethod
    def format_of(target: Path) -> str | None:
        """ASE's name of the format that a suffix stands for, if ASE writes that."""
        from ase.io.formats import extension2format, ioformats

        # Those that ASE knows by the whole name of the file, not by a suffix.
        whole = {"poscar": "vasp", "contcar": "vasp"}.get(target.name.lower())
        known = ioformats.get(whole) if whole else extension2format.get(target.suffix.lstrip("."))
        return known.name if known is not None and known.can_write else None

    def begin(self, snapshot: Snapshot, samples: Any, fields: list[str], target: Path) -> None:
        """Check that the format holds so many samples."""
        from ase.io.formats import ioformats

        known = ioformats.get(self.ase_format)
        if known is None or not known.can_write:
            raise ConfigError("ase_format", f"ASE does not write {self.ase_format!r}")
        if self.ase_format != "traj" and len(samples) != 1:
            raise ConfigError(
                str(self.ase_format),
                "one system is written to it",
                found=f"{len(samples)} samples",
                mend="choose one with samples=[i] (--sample i)",
            )
        self.lost, self.notes = ase_limits(snapshot, fields)
        if self.ase_format != "traj":
            self.notes.append(f"what {self.ase_format!r} keeps of other fields is for ASE to say")
        self._target = target
        if self.ase_format == "traj":
            for name in fields:
                if snapshot.level(name) == "atom" and name not in _KEPT:
                    self.lost[name] = "ASE's trajectory keeps no custom arrays"
            from ase.io.trajectory import Trajectory

            self._trajectory = Trajectory(str(target), "w")

    def write(self, block: Block) -> None:
        """A trajectory takes frame after frame; other formats one system."""
        for sample in iter_samples(block, self.lost):
            atoms = sample.to_atoms()
            if self._trajectory is not None:
                self._trajectory.write(atoms)
            else:
                self._atoms = atoms

    def abort(self) -> None:
        """Close the trajectory."""
        if self._trajectory is not None:
            self._trajectory.close()

    def finish(self) -> None:
        """Close the trajectory, or let ASE write the file."""
        if self._trajectory is not None:
            self._trajectory.close()
            return
        from ase.io import write

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write(str(self._target), self._atoms, format=self.ase_format)
