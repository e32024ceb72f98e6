"""Markers, seeds and offline mode for every test."""

import multiprocessing
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import numpy as np
import pytest
import torch

multiprocessing.set_forkserver_preload(["tests.preloaded"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-faults", action="store_true", help="strike every cell of docs/faults.md, for hours"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    have = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker and marker.args[0] > have:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs, has {have}"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
