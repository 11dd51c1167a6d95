"""The examples in the docstrings of the room give what they show."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest

import alchemi_xr.data
import alchemi_xr.data.kernels

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (alchemi_xr.data, alchemi_xr.data.kernels)
    for module in pkgutil.iter_modules(package.__path__)
    if not module.ispkg
]
EXAMPLES = ["batch", "atomic_data", "segment", "thermo", "transforms", "csr", "kernels.gather"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    with np.printoptions(legacy=False):
        result = doctest.testmod(module, extraglobs={"np": np})
    assert result.failed == 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_there_are_examples(name):
    module = importlib.import_module(f"alchemi_xr.data.{name}")
    found = doctest.DocTestFinder().find(module)
    assert any(test.examples for test in found)
