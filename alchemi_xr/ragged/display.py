"""What a ragged Dataset is, for people: counts, sizes, memory, blocks."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import xarray as xr

from alchemi_xr._typing import IntArray
from alchemi_xr.errors import AlchemiError
from alchemi_xr.ragged.array import is_dask, is_lazy
from alchemi_xr.ragged.chunks import find_partition
from alchemi_xr.ragged.conventions import DIMS, POINTER_NAMES, PTR_DIM, level_of, structure

__all__ = ["html_repr", "text_repr"]

_BARS = "▁▂▃▄▅▆▇█"
_BINS = 24


def _facts(ds: xr.Dataset) -> tuple[list[tuple[str, str]], list[tuple[str, ...]]]:
    """Lines of the head, and a row for each variable."""
    struct = structure(ds)
    atoms = np.diff(struct.atoms_ptr)
    head = [("samples", f"{struct.num_samples:,}"), ("atoms", _spread(atoms))]
    if struct.edges_ptr is not None:
        head.append(("edges", _spread(np.diff(struct.edges_ptr))))
    if len(atoms):
        low, high = int(atoms.min()), int(atoms.max())
        head.append(("sizes", f"{low} {_sparkline(atoms)} {high} atoms"))
    total = sum(v.nbytes for n, v in ds.variables.items() if n not in POINTER_NAMES)
    head.append(("values", _size(total)))
    sizes = find_partition(ds, struct)
    if sizes is not None:
        most = max(sizes)
        head.append(("blocks", f"{len(sizes):,} of at most {most:,} samples"))
    rows: list[tuple[str, ...]] = []
    for name, var in ds.variables.items():
        if name in POINTER_NAMES or PTR_DIM in var.dims:
            continue
        level = level_of(var.dims)
        tail = [str(n) for d, n in zip(var.dims, var.shape, strict=True) if d not in DIMS.values()]
        where = "dask" if is_dask(var) else "store" if is_lazy(var) else "memory"
        unit = str(var.attrs.get("units", ""))
        row: tuple[str, ...] = (
            str(name),
            level or "",
            str(var.dtype),
            "×".join(tail),
            unit,
            _size(var.nbytes),
        )
        rows.append((*row, where))
    return head, rows


def _spread(counts: IntArray) -> str:
    if not len(counts):
        return "0"
    return f"{int(counts.sum()):,} (median {int(np.median(counts)):,}, mean {counts.mean():.1f})"


def _sparkline(counts: IntArray) -> str:
    """Distribution of the sizes, small to large; the logarithm shows the few beside the many."""
    high = np.histogram(counts, bins=min(_BINS, max(1, int(np.ptp(counts)) + 1)))[0]
    scaled = np.log1p(high) / max(np.log1p(high.max()), 1e-9)
    return "".join(" " if n == 0 else _BARS[int(s * 7)] for n, s in zip(high, scaled, strict=True))


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def text_repr(ds: xr.Dataset) -> str:
    """For the terminal; a torn Dataset says what is wrong with it."""
    try:
        head, rows = _facts(ds)
    except AlchemiError as error:
        return f"<ds.ragged: {error}>"
    lines = ["<ds.ragged>", *(f"  {key:<8} {value}" for key, value in head)]
    if rows:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += [
            "    " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    return "\n".join(lines)


def html_repr(ds: xr.Dataset) -> str:
    """For notebooks."""
    try:
        head, rows = _facts(ds)
    except AlchemiError as error:
        return f"<pre>{html.escape(str(error))}</pre>"
    struct = structure(ds)
    out = ["<div><b>ragged Dataset</b><table>"]
    for key, value in head:
        if key == "sizes":
            value = ""
        cell = html.escape(value) if value else _svg(np.diff(struct.atoms_ptr))
        out.append(
            f"<tr><th style='text-align:left'>{html.escape(key)}</th>"
            f"<td style='text-align:left'>{cell}</td></tr>"
        )
    out.append("</table><details open><summary>variables</summary><table><tr>")
    titles = ("name", "level", "dtype", "row", "unit", "size", "in")
    out += [f"<th style='text-align:left'>{t}</th>" for t in titles]
    out.append("</tr>")
    for row in rows:
        cells = "".join(f"<td style='text-align:left'>{html.escape(c)}</td>" for c in row)
        out.append(f"<tr>{cells}</tr>")
    out.append("</table></details></div>")
    return "".join(out)


def _svg(counts: IntArray) -> Any:
    """Histogram of the sizes, drawn without a plotting library."""
    values, edges = np.histogram(counts, bins=min(40, max(1, int(np.ptp(counts)) + 1)))
    top, width = max(int(values.max()), 1), 6
    bars = "".join(
        f"<rect x='{i * width}' y='{30 - 28 * n / top:.1f}' width='{width - 1}' "
        f"height='{28 * n / top:.1f}' fill='#4477aa'>"
        f"<title>{edges[i]:.0f} to {edges[i + 1]:.0f} atoms: {n}</title></rect>"
        for i, n in enumerate(values)
    )
    size = len(values) * width
    return (
        f"{int(counts.min())} <svg width='{size}' height='30' role='img' "
        f"aria-label='sizes of the samples'>{bars}</svg> {int(counts.max())} atoms"
    )
