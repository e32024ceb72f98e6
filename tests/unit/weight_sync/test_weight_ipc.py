"""What a sender says of its GPU memory is plain fields. The memory itself: tests/gpu."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.transports.ipc import (
    in_one_piece,
    open_cuda_buckets,
    place_arguments,
    place_message,
    without_expandable_segments,
)
from tests.hostile import pickled

ARGUMENTS: dict[str, Any] = {
    "tensor_cls": Tensor,
    "tensor_size": torch.Size([2048]),
    "tensor_stride": (1,),
    "tensor_offset": 0,
    "storage_cls": torch.storage.TypedStorage,
    "dtype": torch.uint8,
    "storage_device": 1,
    "storage_handle": bytes(range(64)),
    "storage_size_bytes": 2048,
    "storage_offset_bytes": 4096,
    "requires_grad": False,
    "ref_counter_handle": b"/torch_1_2",
    "ref_counter_offset": 3,
    "event_handle": b"\0" * 64,
    "event_sync_required": True,
}
"""In the order in which `reduce_tensor` gives them for memory of a GPU."""


def message() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(place_message(list(ARGUMENTS.values()))))
    return made


def test_every_argument_arrives_through_plain_json() -> None:
    assert place_arguments(message()) == ARGUMENTS


@pytest.mark.parametrize(
    "change",
    [
        {"storage_device": "0"},
        {"storage_size_bytes": True},
        {"storage_handle": 7},
        {"storage_handle": "no base64!"},
        {"event_sync_required": 1},
        {"event_handle": None},
    ],
)
def test_a_field_of_another_type_is_refused(change: dict[str, Any]) -> None:
    bad = message()
    bad["place"] |= change
    with pytest.raises(WeightSyncError, match="description of its GPU memory is damaged"):
        open_cuda_buckets(bad)


def test_a_pickle_is_no_description(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    handle = base64.b64encode(pickled(mark)).decode()
    for bad in ({"kind": "cuda", "handle": handle}, {"num_bytes": 1, "place": handle}, {}):
        with pytest.raises(WeightSyncError, match="damaged"):
            open_cuda_buckets(bad)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", ""),
        ("expandable_segments:True", "expandable_segments:False"),
        (
            "max_split_size_mb:9,expandable_segments: True,roundup_power2_divisions:[256:1,>:2]",
            "max_split_size_mb:9,expandable_segments: False,roundup_power2_divisions:[256:1,>:2]",
        ),
        ("expandable_segments:False,backend:native", "expandable_segments:False,backend:native"),
    ],
)
def test_memory_of_a_push_is_no_expandable_segment(settings: str, expected: str) -> None:
    """Another process may open one only if it may trace its owner."""
    assert without_expandable_segments(settings) == expected


def test_settings_of_the_allocator_change_for_the_memory_of_a_push_alone() -> None:
    functions: Any = torch._C
    before = functions._accelerator_getAllocatorSettings()
    own = "expandable_segments:True,max_split_size_mb:512"
    try:
        functions._accelerator_setAllocatorSettings(own)
        with in_one_piece():
            inside = functions._accelerator_getAllocatorSettings()
        assert inside == "expandable_segments:False,max_split_size_mb:512"
        assert functions._accelerator_getAllocatorSettings() == own
    finally:
        functions._accelerator_setAllocatorSettings(before)
