"""Names of what training leaves as it is."""

from __future__ import annotations

import pytest

from roll.config.frozen import frozen_names, frozen_tensors
from roll.core.errors import ConfigError

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.visual.merger.mlp.0.weight",
    "model.visual.patch_embed.proj.weight",
)


@pytest.mark.parametrize(
    ("freeze", "found"),
    [
        ((), set()),
        (("model.embed_tokens.*",), {0}),
        (("model.embed_tokens.weight",), {0}),
        (("model.layers.[0-9].*",), {1, 2}),
        (("model.layers.1*",), {2, 3}),
        (("*mlp*", "vision"), {1, 2, 3, 4, 5}),
        (("projector",), {4}),
        (("language",), {0, 1, 2, 3}),
    ],
)
def test_patterns_and_parts_choose_names(freeze: tuple[str, ...], found: set[int]) -> None:
    assert frozen_names(NAMES, freeze) == {NAMES[i] for i in found}


def test_a_pattern_without_a_parameter_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(
        ConfigError, match=r"no parameter .* fits 'model\.embed_token\.weight'"
    ) as at:
        frozen_names(NAMES, ["model.embed_token.weight"])
    assert "did you mean 'model.embed_tokens.weight'" in str(at.value)
    with pytest.raises(ConfigError, match="no parameter of the checkpoint fits"):
        frozen_names(NAMES, ["model.LAYERS.*"])


def test_freezing_all_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="all parameters of the model, so nothing is trained"):
        frozen_names(NAMES, ["model.*"])


def test_a_tensor_of_several_parameters_is_frozen_as_a_whole() -> None:
    tensors = [("qkv", ("q", "k", "v")), ("o", ("o",))]
    assert frozen_tensors(tensors, frozenset("qkv")) == {"qkv"}
    assert frozen_tensors(tensors, frozenset("o")) == {"o"}
    with pytest.raises(
        ConfigError, match=r"q is frozen and k is not, .* one tensor, qkv; freeze all 3"
    ):
        frozen_tensors(tensors, frozenset("q"))
