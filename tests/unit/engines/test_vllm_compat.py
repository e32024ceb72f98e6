"""vLLM's environment: what a user has set stays, except for the cores."""

from __future__ import annotations

import psutil

from roll.strategy.vllm.compat import engine_environment, shut_down


def test_an_engine_on_cpus_keeps_few_kernels_unless_the_user_names_a_number() -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    assert engine_environment("cpu", (0, 1), 1, {})[name] == "64"
    assert name not in engine_environment("cpu", (0, 1), 1, {name: "500"})
    assert name not in engine_environment("cuda", (0, 1), 1, {})


def test_threads_are_bound_to_the_replicas_cores_whatever_is_set() -> None:
    have = {"VLLM_CPU_OMP_THREADS_BIND": "0-63", "OMP_NUM_THREADS": "9"}
    found = engine_environment("cpu", (2, 3), 1, have)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "OMP_NUM_THREADS" not in found


class DyingEngine:
    """An engine whose process ends while it is killed."""

    def __init__(self) -> None:
        self.engine_core = self
        self.cleaned = 0

    def shutdown(self, timeout_s: float) -> None:
        raise psutil.NoSuchProcess(12345)

    def resources(self) -> None:
        self.cleaned += 1


def test_a_process_that_ends_by_itself_while_it_is_killed_is_no_error() -> None:
    engine = DyingEngine()
    shut_down(engine, 0.1)
    assert engine.cleaned == 1
