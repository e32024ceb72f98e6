"""Inputs of layers on their way to host memory and back: order of the copies, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from roll.core.errors import ConfigError
from roll.models.parts.host_inputs import HostInputs, checkpoint_layers

RECOMPUTED = partial(checkpoint, use_reentrant=False)


class Streams:
    """The streams of a device, which note what they are told: `N` is the number of a copy."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._copies, self._inside = 0, False

    def Stream(self) -> Streams:
        return self

    def current_stream(self) -> Streams:
        return self

    @contextmanager
    def stream(self, stream: Streams) -> Iterator[None]:
        yield

    def wait_stream(self, stream: Streams) -> None:
        self.log.append("computed")

    def record_event(self) -> int:
        self._copies += 1
        self.log.append(f"copy {self._copies}")
        return self._copies

    def wait_event(self, event: int) -> None:
        self.log.append(f"wait {event}")


def layers(streams: Streams, count: int, x: Tensor, *, pairs: bool = False) -> Tensor:
    """Run layers, each of which notes when it runs; with `pairs` each has two inputs."""
    inputs = HostInputs(streams, pinned=False)

    def layer(number: int, x: Tensor, other: Tensor | None = None) -> Tensor:
        streams.log.append(f"layer {number}")
        return (x * 1.5 if other is None else x * other).tanh().exp()

    before = x
    for number in range(count):
        own = (x, before * 2) if pairs else (x,)
        before = x
        x = inputs.call(RECOMPUTED, partial(layer, number), *own)  # type: ignore[arg-type]
    return x


def test_copies_run_beside_the_layers_and_come_back_one_layer_ahead() -> None:
    streams = Streams()
    found = layers(streams, 4, torch.ones(3, requires_grad=True) * 0.1)
    there = ["computed", "copy 1", "layer 0", "computed", "copy 2", "layer 1"]
    # From here on the oldest input is dropped, after its copy.
    there += ["computed", "copy 3", "wait 1", "layer 2", "computed", "copy 4", "wait 2", "layer 3"]
    assert streams.log == there
    streams.log.clear()
    found.sum().backward()
    # The last two inputs have not left yet. The others come while a later layer runs once more.
    back = ["wait 4", "layer 3", "wait 3", "computed", "copy 5", "layer 2"]
    back += ["wait 5", "computed", "copy 6", "layer 1", "wait 6", "layer 0"]
    assert streams.log == back


@pytest.mark.parametrize("pairs", [False, True])
def test_gradients_are_those_of_inputs_that_stay_whatever_the_order(pairs: bool) -> None:
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    streams = Streams()
    first, second = (layers(streams, 5, x * scale, pairs=pairs) for scale in (0.1, 0.2))
    found = [
        torch.autograd.grad(part.sum(), x, retain_graph=True)[0]
        for part in (first, second, first)  # the second time, too
    ]

    def plain(scale: float) -> Tensor:
        y, before = x * scale, x * scale
        for _ in range(5):
            own = before * 2
            before = y
            y = (y * own if pairs else y * 1.5).tanh().exp()
        return torch.autograd.grad(y.sum(), x)[0]

    for one, scale in zip(found, (0.1, 0.2, 0.1), strict=True):
        assert torch.equal(one, plain(scale))


def test_each_copy_back_of_two_inputs_is_made_once() -> None:
    streams = Streams()
    found = layers(streams, 5, torch.ones(3, requires_grad=True) * 0.1, pairs=True)
    assert sum(line.startswith("copy") for line in streams.log) == 10
    streams.log.clear()
    found.sum().backward()
    # Two of the ten have not left yet.
    assert sum(line.startswith("copy") for line in streams.log) == 8


def test_an_input_that_is_changed_in_place_meanwhile_is_an_error() -> None:
    x = torch.ones(3, requires_grad=True) * 0.1
    found = layers(Streams(), 1, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        found.sum().backward()


class OfItsOwn(PreTrainedModel):
    """A model whose code says in the old way what is computed again."""

    supports_gradient_checkpointing = True

    def _set_gradient_checkpointing(self, module: Any, value: bool = False) -> None:
        """Set a flag, which nothing reads here."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return torch.nn.Identity()


def test_a_model_that_keeps_inputs_in_a_way_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave offload_activations out"):
        checkpoint_layers(OfItsOwn(PreTrainedConfig()), torch.device("cpu"), offload=True)
