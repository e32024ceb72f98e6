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
from roll.weight_sync.transports.ipc import open_cuda_buckets, place_arguments, place_message
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
