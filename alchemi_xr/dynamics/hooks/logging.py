"""One line of numbers for each system, to a file or to the user's own function."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from alchemi_xr._optional import import_optional
from alchemi_xr.data.thermo import temperature
from alchemi_xr.dynamics.hook import DynamicsStage
from alchemi_xr.errors import ConfigError

if TYPE_CHECKING:
    from alchemi_xr._typing import PathLike
    from alchemi_xr.dynamics.hook import DynamicsContext

__all__ = ["LoggingHook"]

_WHOLE = frozenset({"step", "graph_idx", "system_id", "status"})


class LoggingHook:
    """Logs step, system, status, energy, fmax and temperature.

    Parameters
    ----------
    backend : {"csv", "tensorboard", "custom"}
    frequency : int
    log_path : path, optional
        File of ``csv``, directory of ``tensorboard``. A file that is there is
        continued.
    custom_scalars : dict of str to callable, optional
        Further columns: ``fn(ctx)`` gives a number, or a tensor [B] or [B, 1].
    writer_fn : callable, optional
        Of ``custom``: ``writer_fn(step, rows)`` with one dict for each system.
    stage : DynamicsStage

    Raises
    ------
    ConfigError
        An option is missing or not known; or, from the first call, the file
        that is there has other columns.

    Notes
    -----
    ``graph_idx`` is the place in the batch and changes with a refill;
    ``system_id`` is the system, or -1 where nobody numbers them. What a batch
    does not have is NaN. Numbers are taken at the call, so a later step or
    refill does not change them.
    """

    read_only: ClassVar[bool] = True

    def __init__(
        self,
        backend: str,
        frequency: int = 1,
        log_path: PathLike | None = None,
        custom_scalars: Mapping[str, Callable[[Any], Any]] | None = None,
        writer_fn: Callable[[int, list[dict[str, float]]], None] | None = None,
        stage: Enum = DynamicsStage.AFTER_STEP,
    ) -> None:
        where = "LoggingHook"
        if backend not in ("csv", "tensorboard", "custom"):
            raise ConfigError(
                where,
                f"backend {backend!r} is not known",
                expected="'csv', 'tensorboard' or 'custom'",
            )
        if backend != "custom" and log_path is None:
            raise ConfigError(where, f"backend {backend!r} needs log_path")
        if backend == "custom" and writer_fn is None:
            raise ConfigError(where, "backend 'custom' needs writer_fn")
        taken = set(custom_scalars or ()) & {*_WHOLE, "energy", "fmax", "temperature"}
        if taken:
            raise ConfigError(where, f"custom_scalars {sorted(taken)} are columns already")
        self.backend = backend
        self.frequency = frequency
        self.stage = stage
        self.log_path = None if log_path is None else Path(log_path)
        self.custom_scalars = dict(custom_scalars or {})
        self.writer_fn = writer_fn
        self._file: IO[str] | None = None
        self._board: Any = None

    def __call__(self, ctx: DynamicsContext, stage: Enum) -> None:
        rows = self._rows(ctx)
        if not rows:
            return
        if self.backend == "csv":
            self._write_csv(rows)
        elif self.backend == "tensorboard":
            self._write_board(ctx.step_count, rows)
        else:
            assert self.writer_fn is not None
            self.writer_fn(ctx.step_count, rows)

    def close(self) -> None:
        """Close the files; the next call continues them."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _rows(self, ctx: DynamicsContext) -> list[dict[str, float]]:
        batch = ctx.batch
        count = batch.num_graphs

        def column(value: Any) -> Tensor:
            values = torch.as_tensor(value, device=batch.device).detach().double().reshape(-1)
            return values.expand(count) if values.numel() == 1 else values

        def field(name: str, otherwise: float) -> Tensor:
            if name not in batch:
                return column(otherwise)
            return column(batch[name])

        columns = {
            "step": column(ctx.step_count),
            "graph_idx": torch.arange(count, device=batch.device).double(),
            "system_id": field("system_id", -1),
            "status": field("status", 0),
            "energy": field("energy", torch.nan),
            # Of this moment: a field of that name may be of another one.
            "fmax": column(ctx.derived("fmax") if "forces" in batch else torch.nan),
            "temperature": column(
                temperature(batch["velocities"], batch["atomic_masses"], batch.atoms_ptr)
            ),
        }
        for name, scalar in self.custom_scalars.items():
            columns[name] = column(scalar(ctx))
            if columns[name].numel() != count:
                raise ConfigError(
                    "LoggingHook",
                    f"custom scalar {name!r} has the wrong length",
                    found=columns[name].numel(),
                    expected=f"1 or {count}",
                )
        table = torch.stack(list(columns.values()), dim=1).cpu().tolist()
        return [
            {
                name: int(value) if name in _WHOLE else value
                for name, value in zip(columns, row, strict=True)
            }
            for row in table
        ]

    def _write_csv(self, rows: list[dict[str, float]]) -> None:
        names = list(rows[0])
        if self._file is None:
            self._file = self._open_csv(names)
        writer = csv.DictWriter(self._file, names, lineterminator="\n")
        writer.writerows(rows)
        # One system call a firing, so that a killed run keeps its log.
        self._file.flush()

    def _open_csv(self, names: list[str]) -> IO[str]:
        assert self.log_path is not None
        path = self.log_path
        path.parent.mkdir(parents=True, exist_ok=True)
        header = ",".join(names)
        if path.exists() and path.stat().st_size:
            with path.open(encoding="utf-8", newline="") as old:
                found = old.readline().rstrip("\r\n")
            if found != header:
                raise ConfigError(
                    str(path),
                    "the log that is there has other columns",
                    found=found,
                    expected=header,
                    mend="give another log_path, or move the old log away",
                )
            return path.open("a", encoding="utf-8", newline="")
        file = path.open("w", encoding="utf-8", newline="")
        file.write(header + "\n")
        return file

    def _write_board(self, step: int, rows: list[dict[str, float]]) -> None:
        if self._board is None:
            import_optional("tensorboard", extra="tensorboard", why="LoggingHook")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.log_path))
        for row in rows:
            system = row["system_id"] if row["system_id"] >= 0 else row["graph_idx"]
            for name, value in row.items():
                if name not in ("step", "graph_idx", "system_id"):
                    self._board.add_scalar(f"{name}/{system}", value, step)
