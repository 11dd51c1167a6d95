"""``bench-io`` and what it measures with: facts about numbers of samples, never about time."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from alchemi_xr.cli.main import app
from alchemi_xr.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter, Dataset
from alchemi_xr.data.datapipes.measure import (
    Measured,
    Setting,
    advise,
    copy_bandwidth,
    sweep,
)
from alchemi_xr.errors import ConfigError


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def measured(order: Any, size: int, factor: int, rate: float) -> Measured:
    return Measured(Setting(order, size, factor), structures=int(rate), seconds=1.0, rates=[rate])


def test_every_setting_is_measured_and_threads_end(
    store: Path, no_threads: Callable[[], list[str]]
) -> None:
    visits: list[None] = []
    with Dataset(AtomicDataZarrReader(store), device="cpu") as dataset:
        found = sweep(
            dataset,
            seconds=3.0,
            batch_sizes=(4, 1000),
            prefetch_factors=(0, 2),
            each=lambda: visits.append(None),
        )
        assert no_threads() == []
    # 1000 is more than there is: one batch of everything.
    grid = {(o, b, p) for o in ("sequential", "block", "full") for b in (4, 23) for p in (0, 2)}
    assert {
        (m.setting.order, m.setting.batch_size, m.setting.prefetch_factor) for m in found
    } == grid
    assert len(visits) == 2 * len(grid)
    for one in found:
        assert one.structures > 0
        assert min(one.rates) > 1  # a clock that began elsewhere gave a thousandth
        assert len(one.rates) == 2
        # 23 samples of about 4 atoms with 32 bytes and 100 more each.
        assert 50 < one.bytes_per_structure < 1000
        assert one.first_batch_s < float("inf")
        json.dumps(one.facts())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seconds": 0}, "no time"),
        ({"batch_sizes": [0]}, "batch size too small"),
        ({"prefetch_factors": []}, "prefetch too small"),
        ({"orders": ["random"]}, "order is not known"),
    ],
)
def test_wrong_options(store: Path, options: dict[str, Any], match: str) -> None:
    with (
        Dataset(AtomicDataZarrReader(store), device="cpu") as dataset,
        pytest.raises(ConfigError, match=match),
    ):
        sweep(dataset, **{"seconds": 1.0, **options})


def test_advice_takes_true_randomness_unless_it_costs_much() -> None:
    near = [
        measured("sequential", 64, 2, 1000),
        measured("block", 64, 2, 900),
        measured("full", 64, 2, 800),
    ]
    assert advise(near).shuffle is True
    far = [*near[:2], measured("full", 64, 2, 300)]
    advice = advise(far)
    assert advice.shuffle == "block"
    assert "3.0x as fast as full shuffle" in advice.reasons[0]
    assert advise(near[:1]).shuffle is False


def test_advice_takes_the_smallest_that_is_as_fast() -> None:
    found = [
        measured("full", 16, 2, 500),
        measured("full", 64, 2, 950),
        measured("full", 64, 8, 960),
        measured("full", 256, 2, 1000),
    ]
    assert advise(found).setting == Setting("full", 64, 2)
    # Without a model, reading in the calling thread may be fastest; with one it is not.
    found = [measured("full", 64, 0, 1000), measured("full", 64, 2, 900)]
    assert advise(found).setting.prefetch_factor == 2
    with pytest.raises(ConfigError, match="nothing was measured"):
        advise([])


def test_a_copy_has_a_bandwidth() -> None:
    assert copy_bandwidth(2**16, rounds=1) > 0


def test_command_prints_a_table_and_a_recommendation(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "io.png"
    words = ("bench-io", store, "--device", "cpu", "--seconds", "0.3", "--batch-size", "8")
    shown = call(*words, "--plot", figure)
    assert shown.exit_code == 0, shown.output
    assert "recommended: DataLoader(dataset, batch_size=8" in shown.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")
    told = call(*words, "--order", "full", "--prefetch", "1", "--field", "energy", "--json")
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert facts["recommended"] == {"shuffle": True, "batch_size": 8, "prefetch_factor": 1}
    assert len(facts["measured"]) == 1
    # One float64 a structure, and no other field.
    assert facts["measured"][0]["bytes_per_s"] == pytest.approx(
        8 * facts["measured"][0]["structures_per_s"]
    )


def test_command_says_what_is_wrong(store: Path, tmp_path: Path) -> None:
    for words, match in (
        ((tmp_path / "none.zarr",), "none.zarr"),
        ((store, "--order", "random"), "order is not known"),
        ((store, "--field", "forcess"), "forces"),
        ((store, "--seconds", "0"), "no time"),
        ((store, "--plot", tmp_path / "none" / "io.png"), "no folder"),
    ):
        failed = call("bench-io", *words)
        assert failed.exit_code == 1, failed.output
        assert match in failed.output
    AtomicDataZarrWriter(store).delete(list(range(23)))
    empty = call("bench-io", store)
    assert empty.exit_code == 1
    assert "no samples" in empty.output


def test_without_matplotlib_it_is_said_at_once(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr("importlib.import_module", lambda name: refuse(name))
    failed = call("bench-io", store, "--plot", tmp_path / "io.png")
    assert failed.exit_code == 1
    assert "alchemi_xr[viz]" in failed.output
