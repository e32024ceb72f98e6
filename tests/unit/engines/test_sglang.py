"""SGLang's engine without SGLang: what is sent to it, what is read from it, and its stand-ins."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.config.sections.engines import SglangConfig
from roll.config.sections.model import ModelConfig
from roll.core.completion import Completion, FinishReason
from roll.core.errors import ConfigError, EngineError, IncompleteWeightsError
from roll.core.types import GenerateRequest, Heartbeat, SamplingParams
from roll.strategy.available import status
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.serving.engine_args import check_engine_args
from roll.strategy.sglang import server
from roll.strategy.sglang.arguments import engine_arguments, engine_environment
from roll.strategy.sglang.calls import Calls
from roll.strategy.sglang.engine import SglangEngine
from roll.strategy.sglang.messages import Answer, Call, StartMessage, read_now, write_now
from roll.strategy.sglang.replica import Replica
from roll.strategy.sglang.requests import Sibling, generate_input, sibling_id
from roll.strategy.sglang.stops import tokens_to_keep
from roll.strategy.sglang.supported_arguments import RESERVED_ARGUMENTS, known_arguments
from tests.contract.engine_rig import SPEC
from tests.tiny import ALPHABET, char_tokenizer

ORDER = StartMessage({"tp_size": 1}, "model", False, 64, {}, frozenset(), True, "actor_infer[0]")
PLAIN = SamplingParams(temperature=1.0, max_new_tokens=8)
CUT = SamplingParams(temperature=1.0, max_new_tokens=8, top_p=0.9)


@given(
    text=st.text("ab", min_size=1, max_size=24),
    seen=st.integers(0, 23),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_a_response_ends_with_the_first_token_that_completes_a_stop_string(
    text: str, seen: int, stops: list[str]
) -> None:
    def ends() -> int | None:
        prefixes = (end for end in range(1, len(text) + 1) if any(s in text[:end] for s in stops))
        return next(prefixes, None)

    expected = ends()
    if expected is not None and expected <= seen:
        return  # found before
    tokens = [4 + ALPHABET.index(letter) for letter in text]
    assert tokens_to_keep(char_tokenizer(), tokens, min(seen, len(text) - 1), stops) == expected


def asked(
    sampling: SamplingParams, *, prompt: int = 3, seed: int | None = 5, index: int = 2
) -> dict[str, Any]:
    request = GenerateRequest("r", tuple(range(prompt)), sampling, n=4, seed=seed)
    return generate_input(request, index, max_model_len=10, vocab_size=100, eos=1)


def test_a_request_never_asks_for_more_tokens_than_the_engine_holds() -> None:
    assert asked(PLAIN)["sampling_params"]["max_new_tokens"] == 7
    assert asked(PLAIN, prompt=9)["sampling_params"]["max_new_tokens"] == 1
    with pytest.raises(EngineError, match="10 prompt tokens; the engine takes fewer than 10"):
        asked(PLAIN, prompt=10)


def test_siblings_have_their_own_seeds_and_unseeded_ones_differ() -> None:
    assert asked(PLAIN)["sampling_params"]["sampling_seed"] == 7
    seeds = {asked(PLAIN, seed=None)["sampling_params"]["sampling_seed"] for _ in range(8)}
    assert len(seeds) == 8


def test_no_name_of_a_sibling_begins_another_one_because_sglang_aborts_by_prefix() -> None:
    names = [sibling_id(request, i) for request in ("a", "a#1.", "a1") for i in range(12)]
    assert not any(a != b and b.startswith(a) for a in names for b in names)


@pytest.mark.parametrize(
    ("sampling", "cut", "top_k"),
    [
        (PLAIN, False, -1),
        (CUT, True, 100),
        (SamplingParams(temperature=1.0, max_new_tokens=8, top_k=5), True, 5),
        (SamplingParams(temperature=0.0, max_new_tokens=8, top_k=5), False, 5),
    ],
)
def test_logprobs_of_a_cut_distribution_are_asked_for_where_there_is_one(
    sampling: SamplingParams, cut: bool, top_k: int
) -> None:
    found = asked(sampling)
    assert found["return_sampling_mask"] is cut
    assert found["sampling_params"]["top_k"] == top_k


def output(tokens: list[int], versions: list[int], finish: dict[str, Any] | None) -> dict[str, Any]:
    """An output of SGLang: all tokens so far, with runs of equal versions as spans."""
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": at, "end": at})
        spans[-1]["end"] = at + 1
    meta = {
        "finish_reason": finish,
        "weight_versions": spans,
        "output_token_logprobs": [(-0.1 * token, token, None) for token in tokens],
        "output_token_sampling_logprobs": [-0.2 * token for token in tokens],
    }
    return {"output_ids": tokens, "meta_info": meta}


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=20).map(sorted),
    cuts=st.lists(st.integers(0, 20), max_size=5).map(sorted),
)
def test_pieces_of_output_add_up_to_tokens_with_the_version_that_wrote_each(
    versions: list[int], cuts: list[int]
) -> None:
    sibling = Sibling()
    tokens = list(range(len(versions)))
    for cut in cuts:
        sibling.extend(output(tokens[:cut], versions[:cut], None), PLAIN)
        assert sibling.finish is FinishReason.ABORT
    sibling.extend(output(tokens, versions, {"type": "length"}), PLAIN)
    whole = sibling.after(0)
    assert (list(whole.tokens), list(whole.versions)) == (tokens, versions)
    assert list(whole.logprobs) == pytest.approx([-0.1 * token for token in tokens])
    assert whole.finish is FinishReason.LENGTH


def test_a_cut_distribution_reports_its_own_logprobs_and_a_refusal_is_an_error() -> None:
    sibling = Sibling()
    sibling.extend(output([1, 2], [0, 0], None), CUT)
    assert list(sibling.logprobs) == pytest.approx([-0.2, -0.4])
    refusal = {"type": "abort", "status_code": 400, "message": "too long"}
    with pytest.raises(EngineError, match="too long"):
        sibling.extend(output([1, 2], [0, 0], refusal), CUT)


def arguments(overrides: dict[str, Any] | None = None, /, **options: Any) -> dict[str, Any]:
    return engine_arguments(
        SglangConfig(**options),
        ModelConfig(path="m"),
        dtype="float32",
        max_model_len=64,
        seed=0,
        cpu=True,
        overrides=overrides or {},
    )


def test_values_of_the_model_config_reach_sglang_as_json() -> None:
    assert "json_model_override_args" not in arguments()
    assert arguments({"a": {"b": 1}})["json_model_override_args"] == '{"a": {"b": 1}}'


def test_further_arguments_reach_sglang_and_all_of_ours_are_the_frameworks_to_set() -> None:
    found = arguments(engine_args={"schedule_policy": "fcfs"})
    assert found["schedule_policy"] == "fcfs"
    on_cpus = {"device", "attention_backend", "grammar_backend", "disable_overlap_schedule"}
    users = {"schedule_policy", "sleep_on_idle"}
    assert found.keys() - users - on_cpus <= RESERVED_ARGUMENTS.keys()


def test_sglang_waits_without_a_core_unless_the_user_wants_it_to_ask_all_the_time() -> None:
    assert arguments()["sleep_on_idle"]
    assert not arguments(engine_args={"sleep_on_idle": False})["sleep_on_idle"]


def test_arguments_that_sglang_lacks_or_that_are_not_to_be_set_are_refused_by_name() -> None:
    known = frozenset({"schedule_policy", "tp_size", "log_level"})

    def check(*names: str) -> None:
        check_engine_args(names, engine="SGLang", ours=RESERVED_ARGUMENTS, known=lambda: known)

    check("schedule_policy")
    with pytest.raises(ConfigError, match="no such argument; did you mean 'schedule_policy'"):
        check("schedul_policy")
    with pytest.raises(ConfigError, match=r"tp_size: set actor_infer.strategy.tp instead"):
        check("tp_size")
    with pytest.raises(ConfigError, match="log_level: cannot be set"):
        check("log_level")


@pytest.mark.skipif(not status("sglang").ok, reason=status("sglang").advice)
def test_the_arguments_of_the_installed_sglang_are_read_from_its_source() -> None:
    assert known_arguments() >= RESERVED_ARGUMENTS.keys() | {"schedule_policy", "attention_backend"}


def test_each_rank_without_a_gpu_has_its_share_of_the_cores() -> None:
    found = engine_environment("cpu", (2, 3, 4, 5), 2, {"PATH": "p", "OMP_NUM_THREADS": "9"}, "f")
    assert found["SGLANG_CPU_OMP_THREADS_BIND"] == "2,3|4,5"
    assert (found["OMP_NUM_THREADS"], found["PATH"], found["TMPDIR"]) == ("2", "p", "f")
    assert engine_environment("cpu", (7,), 2, {}, "f")["SGLANG_CPU_OMP_THREADS_BIND"] == "7|7"


async def with_other_end(
    other: Callable[[socket.socket], None], use: Callable[[Calls], Any]
) -> Any:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=other, args=(theirs,))
    thread.start()
    calls = Calls(ours, "SGLang of actor_infer[0]")
    try:
        await asyncio.wait_for(calls.begin(ORDER), 10)
        return await asyncio.wait_for(use(calls), 10)
    finally:
        calls.end()
        thread.join()
        theirs.close()


async def say(replica: Replica, name: str) -> str:
    """As much of a method as a call needs: a name, by which it is sent."""
    return f"to {name}"


def test_answers_find_their_calls_in_any_order_and_the_end_finds_all() -> None:
    def other(end: socket.socket) -> None:
        assert read_now(end) == ORDER
        write_now(end, Answer(0, 17))
        asked: list[Call] = [read_now(end) for _ in range(3)]
        assert [call.arguments for call in asked] == [("a",), ("b",), ("c",)]
        write_now(end, Answer(asked[1].id, "to b"))
        write_now(end, Answer(asked[0].id, error=EngineError("not a")))
        end.close()

    async def use(calls: Calls) -> None:
        a, b, c = (calls.call(say, name) for name in "abc")
        assert await b == "to b"
        with pytest.raises(EngineError, match="not a"):
            await a
        with pytest.raises(ConnectionError, match=r"actor_infer\[0\] is not running"):
            await c
        with pytest.raises(ConnectionError, match="is not running"):
            await calls.call(Replica.heartbeat)

    asyncio.run(with_other_end(other, use))


@pytest.mark.parametrize("answer", [Answer(0, error=EngineError("no model")), None])
def test_an_engine_that_cannot_start_says_why_or_is_found_gone(answer: Answer | None) -> None:
    def other(end: socket.socket) -> None:
        read_now(end)
        if answer is not None:
            write_now(end, answer)
        end.close()

    error = EngineError if answer else ConnectionError
    with pytest.raises(error, match=r"no model|is not running"):
        asyncio.run(with_other_end(other, lambda calls: calls.call(Replica.heartbeat)))


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole words; after Austin Appleby's reference."""

    def rotated(value: int, bits: int) -> int:
        return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF

    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotated(state ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_the_stand_in_hashes_as_murmur_does() -> None:
    import roll.strategy.sglang.stand_ins.sgl_kernel  # noqa: F401 - registers the operator

    assert murmur3(b"test") == 0xBA6BD213  # published
    seeds, positions = [0, 5, 2**62 + 77, 2**64 - 1], [0, 9, 2**31, 3]
    found = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.arange(70)
    )
    expected = [
        [murmur3(struct.pack("<QII", seed, at, column)) for column in range(70)]
        for seed, at in zip(seeds, positions, strict=True)
    ]
    assert found.dtype == torch.uint32
    assert found.tolist() == expected


class Failing:
    """Calls of which the first one fails."""

    def __init__(self) -> None:
        self.count = 0

    def call(self, *_: object) -> asyncio.Future[Heartbeat]:
        self.count += 1
        answer: asyncio.Future[Heartbeat] = asyncio.get_running_loop().create_future()
        if self.count == 1:
            answer.set_exception(EngineError("a scheduler did not answer"))
        else:
            answer.set_result(Heartbeat(self.count, 0, 0, {}))
        return answer


def test_a_heartbeat_that_failed_does_not_fail_the_next_ones() -> None:
    setup = EngineSetup(
        spec=SPEC, model=ModelConfig(path="model"), dtype="float32", max_model_len=64
    )

    async def main() -> None:
        engine = SglangEngine(SglangConfig(), setup)
        engine._calls = Failing()  # type: ignore[assignment]
        with pytest.raises(EngineError, match="a scheduler did not answer"):
            await engine.heartbeat()
        assert (await engine.heartbeat()).version == 2
        assert (await engine.heartbeat()).version == 3

    asyncio.run(main())


def test_a_request_that_meets_the_begin_of_a_push_waits_for_its_end(tmp_path: Path) -> None:
    char_tokenizer().save_pretrained(tmp_path)
    request = GenerateRequest("r", (1, 2), PLAIN, n=2, seed=5)

    async def main(after: Callable[[Replica], Awaitable[None]]) -> list[Completion]:
        manager = SimpleNamespace(abort_request=lambda rid: None)  # and no way to generate
        engine = SimpleNamespace(tokenizer_manager=manager)
        replica = Replica(engine, replace(ORDER, tokenizer=str(tmp_path)))
        answer = asyncio.ensure_future(replica.generate(request))
        await asyncio.sleep(0)
        replica._open.clear()
        await asyncio.sleep(0.01)
        await after(replica)
        replica._open.set()
        return await answer

    async def tear(replica: Replica) -> None:
        replica._broken = "a sender is gone"

    with pytest.raises(IncompleteWeightsError, match="a sender is gone"):
        asyncio.run(main(tear))
    aborted = asyncio.run(main(lambda replica: replica.abort("r")))
    assert [(len(one), one.finish) for one in aborted] == [(0, FinishReason.ABORT)] * 2


def test_stop_tokens_stand_beside_the_end_of_sequence_and_never_alone_with_it_ignored() -> None:
    stops = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(7, 5))
    assert asked(stops)["sampling_params"]["stop_token_ids"] == [1, 5, 7]
    with pytest.raises(EngineError, match="has stop_token_ids: with SGLang, `ignore_eos`"):
        asked(replace(stops, ignore_eos=True))


def test_the_process_of_a_worker_that_was_killed_removes_its_temporary_files(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "temporary"
    (folder / "of-sglang").mkdir(parents=True)
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(EOFError):
        server.main(theirs.detach(), str(folder))
    assert not folder.exists()
