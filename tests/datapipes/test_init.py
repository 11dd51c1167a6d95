from __future__ import annotations

import subprocess
import sys

import pytest

import alchemi_xr.data
from alchemi_xr.data import datapipes


@pytest.mark.parametrize("name", datapipes.__all__)
def test_every_name_is_there(name: str) -> None:
    found = getattr(datapipes, name)
    assert found.__doc__
    if name in alchemi_xr.data.__all__:
        assert getattr(alchemi_xr.data, name) is found


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DataLoder"):
        _ = datapipes.DataLoder
    assert "DataLoader" in dir(datapipes)


def test_codecs_are_chosen_without_torch() -> None:
    code = (
        "import sys; from alchemi_xr.data.datapipes import ZarrWriteConfig; ZarrWriteConfig();"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
