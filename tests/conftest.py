"""What every test can use: the shared inputs, quiet progress, a hypothesis profile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


class S3:
    """A real S3 server (moto's) in a process of its own, with one bucket.

    Never in this process: clients in Rust and a server in Python would wait for
    one another.
    """

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._number = 0
        deadline = time.monotonic() + 60
        while True:
            try:
                request = urllib.request.Request(f"{self.endpoint}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline or self.process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    @property
    def options(self) -> dict[str, Any]:
        """Storage options, as s3fs takes them."""
        return {
            "key": "test",
            "secret": "test",
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    @property
    def icechunk_options(self) -> dict[str, Any]:
        """Storage options, as Icechunk takes them."""
        return {
            "access_key_id": "test",
            "secret_access_key": "test",
            "endpoint_url": self.endpoint,
            "region": "us-east-1",
        }

    def prefix(self) -> str:
        """A prefix where nothing is."""
        self._number += 1
        return f"store{self._number}.zarr"

    def url(self) -> str:
        return f"s3://bucket/{self.prefix()}"

    def obstore(self, prefix: str) -> Any:
        """A store of obstore below a prefix."""
        from obstore.store import S3Store

        return S3Store(
            "bucket",
            prefix=prefix,
            endpoint=self.endpoint,
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """An S3 server on this machine; skips where a package is missing."""
    for package in ("moto", "flask", "obstore", "s3fs"):
        pytest.importorskip(package, reason=f"{package} (extra cloud, or test tools) is missing")
    server = S3()
    yield server
    server.stop()


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
