"""Every figure is drawn without a parameter, with labels and units."""

from __future__ import annotations

import numpy as np
import pytest

from alchemi_xr import analysis
from alchemi_xr.errors import ConfigError

matplotlib = pytest.importorskip("matplotlib", reason="extra viz: matplotlib")
matplotlib.use("Agg")

from alchemi_xr.analysis import plot  # noqa: E402


@pytest.fixture
def ds(store):
    rng = np.random.default_rng(0)
    x = np.cumsum(rng.normal(size=(40, 6, 3)) * 0.1, axis=0) + rng.random((6, 3)) * 5
    out = store(
        x,
        [8, 1, 1, 8, 1, 1],
        velocities=rng.normal(size=(40, 6, 3)) * 0.01,
        forces=rng.normal(size=(40, 6, 3)),
        energy=rng.normal(size=40),
        stress=rng.normal(size=(40, 3, 3)) * 1e-3,
        cell=np.eye(3) * 6,
        pbc=True,
        time=np.arange(40) * 2.0,
    )
    yield out
    import matplotlib.pyplot as pyplot

    pyplot.close("all")


def test_every_analysis_has_its_figure(ds):
    names = dir(ds.ragged.plot)
    assert set(names) >= set(analysis.__all__) - {"diffusion", "outliers", "fingerprints"}
    for name in names:
        ax = getattr(ds.ragged.plot, name)()
        assert ax.get_xlabel(), name
        assert ax.get_ylabel(), name
        ax.figure.canvas.draw()
        import matplotlib.pyplot as pyplot

        pyplot.close(ax.figure)
    assert plot.draw(analysis.diffusion(analysis.msd(ds))).get_ylabel().endswith("(Å²/fs)")


def test_labels_carry_units(ds):
    assert ds.ragged.plot.rdf(rmax=4.0).get_xlabel() == "distance (Å)"
    assert ds.ragged.plot.msd().get_ylabel() == "mean squared displacement (Å²)"
    assert ds.ragged.plot.msd().get_xlabel() == "time lag (fs)"
    assert ds.ragged.plot.vacf().get_xlabel() == "wavenumber (cm⁻¹)"
    assert ds.ragged.plot.vacf(what="vacf").get_xlabel() == "time lag (fs)"
    assert ds.ragged.plot.temperature().get_xlabel() == "time (fs)"
    assert ds.ragged.plot.statistics(by="element").get_ylabel().endswith("(eV/Å)")


def test_own_axes_are_used(ds):
    import matplotlib.pyplot as pyplot

    figure, axes = pyplot.subplots(1, 2)
    assert ds.ragged.plot.sizes(ax=axes[0]) is axes[0]
    assert plot.draw(analysis.rdf(ds), ax=axes[1]) is axes[1]
    assert len(figure.axes) == 2


def test_what_is_no_plot(ds):
    with pytest.raises(AttributeError, match="no 'rdff'"):
        ds.ragged.plot.rdff()
    with pytest.raises(ConfigError, match="no plot"):
        ds.ragged.plot("rdff")
    with pytest.raises(ConfigError, match="no result of an analysis"):
        plot.draw(ds)
