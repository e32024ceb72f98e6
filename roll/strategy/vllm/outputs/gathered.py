"""Outputs of several steps of vLLM in one message on their way from its core.

After each step vLLM's core packs an output for each request, and the process that owns the engine
unpacks and files it. On CPUs both take time from the cores that compute the next step. A request
that is answered as a whole has no reader before it ends, so its outputs wait in the core for those
of later steps, and the same tokens come in fewer messages (benchmarks/engine_changes.py).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

GATHERS = "ROLL_VLLM_GATHERS_OUTPUTS"
"""Environment variable that is 1 in engines whose outputs wait; 0 sends those of each step."""
MOST_STEPS = 16
"""Largest number of steps in a message. A heartbeat asks the core, and the answer brings along what
waits there. So this is only the number of tokens that a request may lose when its engine dies."""

_MORE = attrgetter(
    "new_prompt_logprobs_tensors",
    "prompt_token_id_logprobs",
    "pooling_output",
    "events",
    "kv_transfer_params",
    "ec_transfer_params",
    "routed_experts",
    "new_sampling_mask",
)
"""What outputs may have beside tokens and their log-probs. An output that has any does not wait,
unless it is the last of its request."""


def gather_outputs() -> None:
    """Let outputs wait in the core of vLLM, if this process is one and `GATHERS` says so.

    vLLM calls this function as a plug-in (`vllm.general_plugins` in setup.py) in all of its
    processes, in a core while it starts.
    """
    core = sys.modules.get("vllm.v1.engine.core")
    if core is None or os.environ.get(GATHERS) != "1":
        return
    of_vllm = core.EngineCoreProc.run_busy_loop

    def run_busy_loop(self: Any) -> None:
        """Run the core; called once, before its first step."""
        queue = self.output_queue
        queue.put_nowait = GatheredOutputs(queue.put_nowait, self.scheduler.requests).put
        of_vllm(self)

    core.EngineCoreProc.run_busy_loop = run_busy_loop


class GatheredOutputs:
    """Outputs that wait for those of later steps; its `put` replaces `put_nowait` of a core's queue
    of messages.

    Outputs wait until a request ends, until there are those of `MOST_STEPS`, or until the core has
    anything else to say, such as the answer to a call: so they come before it, and a caller that
    has its answer has all tokens written before. (`Pushes` relies on that: it pauses the core by a
    call before it changes the weights.)

    Args:
        send: the queue's own `put_nowait`. A message is a client's number with vLLM's
            `EngineCoreOutputs`, or bytes.
        requests: the scheduler's requests, by their ids.
    """

    def __init__(self, send: Callable[[Any], None], requests: Mapping[str, Any]) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._as_whole = RequestOutputKind.FINAL_ONLY
        self._send = send
        self._requests = requests
        self._client = 0
        self._waiting: list[Any] = []
        """Outputs of steps, all for `_client` and of the same version of the weights."""
        self._lock = threading.Lock()  # the thread that reads requests reports those it refuses

    def put(self, message: Any) -> None:
        """Let a message wait, or send it after those that wait."""
        with self._lock:
            if isinstance(message, bytes) or not self._may_wait(message[1]):
                self._send_waiting()
                self._send(message)
                return
            client, outputs = message
            if self._waiting and (
                client != self._client or outputs.weight_version != self._waiting[0].weight_version
            ):
                self._send_waiting()
            self._client = client
            self._waiting.append(outputs)
            ends = any(output.finish_reason is not None for output in outputs.outputs)
            if ends or len(self._waiting) == MOST_STEPS:
                self._send_waiting()

    def _may_wait(self, outputs: Any) -> bool:
        """Return whether these are a step's outputs and nothing else, and nobody waits for one."""
        return (
            bool(outputs.outputs)
            and outputs.utility_output is None
            and outputs.scheduler_stats is None
            and not outputs.finished_requests
            and all(
                output.finish_reason is not None or self._is_part(output)
                for output in outputs.outputs
            )
        )

    def _is_part(self, output: Any) -> bool:
        """Return whether nobody reads this output before its request ends."""
        request = self._requests.get(output.request_id)
        if request is None or request.sampling_params is None:
            return False
        sampling = request.sampling_params
        return (
            sampling.output_kind is self._as_whole
            and not sampling.detokenize  # its text may have a stop string, which ends the request
            and not any(each is not None for each in _MORE(output))
        )

    def _send_waiting(self) -> None:
        if self._waiting:
            self._send((self._client, joined(self._waiting)))
            self._waiting = []


def joined(steps: Sequence[Any]) -> Any:
    """Return the outputs of some steps as those of one step that has written all the tokens.

    Args:
        steps: vLLM's `EngineCoreOutputs`, of which the last is changed and returned.
    """
    parts: dict[str, list[Any]] = {}
    for step in steps:
        for output in step.outputs:
            parts.setdefault(output.request_id, []).append(output)
    last = steps[-1]
    last.outputs = [_joined_parts(each) for each in parts.values()]
    return last


def _joined_parts(parts: Sequence[Any]) -> Any:
    """Return the outputs of one request as one: its last, with the tokens of all."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    last.prefill_stats = parts[0].prefill_stats  # only the first output of a request has some
    found = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    if found:
        last.new_logprobs = type(found[0])(*map(_concatenated, *(each[:3] for each in found)))
    return last


def _concatenated(*pieces: Any) -> Any:
    """Return lists or arrays as one."""
    if isinstance(pieces[0], list):
        return [number for piece in pieces for number in piece]
    import numpy as np

    return np.concatenate(pieces)
