"""Markers, seeds and offline mode for every test."""

import gc
import multiprocessing
import os
import random
import signal
from collections.abc import Generator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Threads of engines that wait for their next tiny tensor would spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import numpy as np
import pytest
import torch

from tests.turns import in_turn, turn

multiprocessing.set_forkserver_preload(["tests.preloaded"])
# `nohup` and background shells leave these ignored; the commands that tests start would inherit it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Threads wait for one another by spinning, and tiny tensors are no faster with several: two of
# pytest's workers on two cores took four times as long with two threads each.
torch.set_num_threads(1)

# Speed belongs into a benchmark: on a busy machine any example may take long.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-faults", action="store_true", help="strike every cell of docs/faults.md, for hours"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    have = torch.cuda.device_count()
    for item in items:
        # Tests of a module share fixtures, so one worker runs them all; where `in_groups` marks the
        # parameters of a fixture, one for each parameter.
        item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
        marker = item.get_closest_marker("gpu")
        if marker and marker.args[0] > have:
            item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]} GPUs, has {have}"))
    items[:] = in_turn(items)


def pytest_collection_finish() -> None:
    # Thousands of tests and all that they import: with them, `gc.collect` takes more than a second.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # modules that end in order say otherwise what they leave behind


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` has the machine to itself; outermost, so no time limit runs yet."""
    with turn(item.config, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
