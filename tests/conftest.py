"""What every test can use: the shared inputs, quiet progress, a hypothesis profile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

# One thread a process: the machines that run this have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_slow_machine = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "dev", max_examples=25, deadline=None, suppress_health_check=_slow_machine
)
settings.register_profile(
    "ci",
    max_examples=60,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=_slow_machine,
)
settings.register_profile(
    "nightly", max_examples=1000, deadline=None, suppress_health_check=_slow_machine
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared inputs beside the checkout, or a skip."""
    if not (SHARED / "cases").is_dir():
        pytest.skip("the shared inputs (../shared beside the checkout) are not here")
    return SHARED


@pytest.fixture(autouse=True)
def _quiet_progress():
    """No live bars in test output; tests of progress set their own mode."""
    from alchemi_xr.config import set_options

    with set_options(progress="off"):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` skip where there is no CUDA device."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    try:
        import torch

        available = torch.cuda.is_available()
    except ImportError:
        available = False
    if not available:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
