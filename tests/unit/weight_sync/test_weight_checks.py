"""What is refused before the first byte, and what a checksum sees."""

from __future__ import annotations

import pytest
import torch

from roll.core.errors import ConfigError, WeightSyncError
from roll.weight_sync.checks import check_shapes
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest, TensorMeta
from roll.weight_sync.transport_choice import Endpoint, Route, choose_transport, new_channel

EXPECTED = {"a": (2, 3), "b": (4,), "head": (5,)}
OPTIONAL = frozenset({"head"})


def manifest_of(**shapes: tuple[int, ...]) -> Manifest:
    return Manifest.of((n, torch.empty(s, device="meta")) for n, s in shapes.items())


def test_a_name_announced_twice_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="twice"):
        Manifest.of([("a", torch.ones(1)), ("a", torch.ones(1))])


@pytest.mark.parametrize("cuts", [((0, 3),), ((0, 2, 1, 4),), ((1, 4),), ((0, 4), (0, 4)), ((4,),)])
def test_cuts_that_do_not_share_a_tensor_out_are_refused(cuts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(WeightSyncError, match="cuts"):
        Manifest((TensorMeta("a", (4,), "float32"),), cuts)


def test_a_manifest_survives_its_journey() -> None:
    metas = (TensorMeta("a", (4,), "bfloat16"), TensorMeta("b", (), "int64"))
    manifest = Manifest(metas, ((0, 1, 4), (0, 1, 1)), frozenset({"c"}))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.without(["a"]).cuts == ((0, 1, 1),)
    assert manifest.without(["a"]).unchanged == {"a", "c"}


def test_a_manifest_is_checked_against_the_model() -> None:
    def check(**shapes: tuple[int, ...]) -> None:
        check_shapes(manifest_of(**shapes), EXPECTED, optional=OPTIONAL)

    check(a=(2, 3), b=(4,))
    check(b=(4,), a=(2, 3), head=(5,))
    with pytest.raises(WeightSyncError, match=r"1 tensors are missing, e.g. 'b'"):
        check(a=(2, 3))
    with pytest.raises(WeightSyncError, match=r"1 tensors are unknown, e.g. 'c'"):
        check(a=(2, 3), b=(4,), c=(1,))
    with pytest.raises(WeightSyncError, match=r"'a' has shape \[3, 2\], expected \[2, 3\]"):
        check(a=(3, 2), b=(4,))


def test_only_what_a_receiver_holds_may_stay_away_as_unchanged() -> None:
    partial = manifest_of(a=(2, 3), b=(4,)).without(["b"])
    check_shapes(partial, EXPECTED, optional=OPTIONAL, held=frozenset({"a", "b"}))
    with pytest.raises(WeightSyncError, match=r"'b', but this engine never received them"):
        check_shapes(partial, EXPECTED, optional=OPTIONAL, held=frozenset({"a"}))
    other = manifest_of(a=(2, 3), b=(4,), c=(1,)).without(["c"])
    with pytest.raises(WeightSyncError, match="unknown"):
        check_shapes(other, EXPECTED, optional=OPTIONAL, held=frozenset({"c"}))


def test_the_checksum_sees_names_shapes_dtypes_places_and_bits_but_no_order() -> None:
    def digest(*pieces: tuple[TensorMeta, int, list[int]]) -> str:
        checksum = Checksum()
        for meta, start, raw in pieces:
            checksum.add(meta, start, torch.tensor(raw, dtype=torch.uint8))
        return checksum.hexdigest()

    a, b = TensorMeta("a", (4,), "uint8"), TensorMeta("b", (4,), "uint8")
    base = digest((a, 0, [1, 2, 3, 4]), (b, 0, [5, 6, 7, 8]))
    assert digest((b, 0, [5, 6, 7, 8]), (a, 0, [1, 2, 3, 4])) == base
    others = [
        digest((a, 0, [5, 6, 7, 8]), (b, 0, [1, 2, 3, 4])),
        digest((TensorMeta("a", (2, 2), "uint8"), 0, [1, 2, 3, 4]), (b, 0, [5, 6, 7, 8])),
        digest((TensorMeta("a", (4,), "int8"), 0, [1, 2, 3, 4]), (b, 0, [5, 6, 7, 8])),
        digest((a, 0, [1, 2, 3, 5]), (b, 0, [5, 6, 7, 8])),
        digest((a, 1, [1, 2, 3, 4]), (b, 0, [5, 6, 7, 8])),
        digest((a, 0, [1, 2, 3, 4])),
    ]
    assert len({base, *others}) == 7


def test_checksums_of_senders_add_up_to_that_of_a_receiver() -> None:
    meta = TensorMeta("a", (4,), "uint8")
    raw = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    receiver, leader, helper = Checksum(), Checksum(), Checksum()
    for start in (0, 2):
        receiver.add(meta, start, raw[start : start + 2])
    leader.add(meta, 0, raw[:2])
    helper.add(meta, 2, raw[2:])
    leader.merge(helper.hexdigest())
    assert leader.hexdigest() == receiver.hexdigest()


def test_the_transport_follows_from_the_places() -> None:
    here, beside, there = Endpoint(0, 0), Endpoint(0, 1), Endpoint(1, 0)
    assert choose_transport("cpu", [here], [here, beside]).kind == "shared_memory"
    assert choose_transport("cuda", [here], [here]).kind == "cuda_ipc"
    assert choose_transport("cuda", [here], [here, beside]).kind == "shared_memory"
    assert choose_transport("cuda", [here, beside], [here, beside]).kind == "shared_memory"
    assert choose_transport("cpu", [here], [beside, there]) == Route("broadcast", "gloo")
    assert choose_transport("cpu", [here, there], [beside]) == Route("broadcast", "gloo")


def test_nccl_carries_a_broadcast_only_where_every_process_has_a_gpu_of_its_own() -> None:
    here, beside, there = Endpoint(0, 0), Endpoint(0, 1), Endpoint(1, 0)
    assert choose_transport("cuda", [here], [beside, there]) == Route("broadcast", "nccl")
    assert choose_transport("cuda", [here, beside], [there]) == Route("broadcast", "nccl")
    for senders, receivers in [([here], [here, there]), ([here], [there, there])]:
        assert choose_transport("cuda", senders, receivers) == Route("broadcast", "gloo")


def test_files_need_a_folder() -> None:
    with pytest.raises(ConfigError, match="no folder"):
        new_channel("files", num_receivers=1)
