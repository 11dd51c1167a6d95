"""Every snippet of the README and the docs runs as shown.

The Python blocks of one file share a namespace and a temporary folder; the shell
blocks run there too, one after the other, with the project's commands on the path.
A block after the comment ``<!-- no-run: reason -->`` is shown only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"^(?P<skip><!-- no-run: [^>]+ -->\n+)?```(?P<kind>python|bash)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(kind, code) of the blocks that run, in order."""
    return [(m["kind"], m["code"]) for m in _FENCE.finditer(page.read_text()) if m["skip"] is None]


RUNNABLE = [page for page in PAGES if "_build" not in page.parts and blocks(page)]


def test_there_are_snippets() -> None:
    assert (ROOT / "README.md") in RUNNABLE


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: str(p.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path) -> None:
    # One script a page: a Dask worker or a fork must be able to import what it needs,
    # and a shell block in between sees the files that the Python before it wrote.
    script = ["import subprocess, sys"]
    for kind, code in blocks(page):
        if kind == "python":
            script.append(code)
        else:
            script.append(
                f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {code!r}], check=True)"
            )
    (tmp_path / "body.txt").write_text("\n".join(script))
    path = tmp_path / "page.py"
    path.write_text(
        "if __name__ == '__main__':\n"
        "    exec(compile(open('body.txt').read(), 'page', 'exec'), globals())\n"
    )
    bin_dir = str(Path(sys.executable).parent)
    result = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PATH": bin_dir + os.pathsep + os.environ["PATH"], "MPLBACKEND": "Agg"},
    )
    assert result.returncode == 0, f"{page.name}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
