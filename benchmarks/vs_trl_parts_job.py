"""The parts that `vs_trl.py` compares a run with: an engine alone, and plain PyTorch.

python benchmarks/vs_trl_parts_job.py vllm|roll run.yaml steps.jsonl
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.vs_trl_job import share_of_digits
from roll.config import load_config
from roll.config.rlvr import RlvrConfig
from roll.config.sections.engines import VllmConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion, FinishReason, VersionRuns
from roll.core.types import GenerateRequest, Prompt, SamplingParams, WorkerSpec
from roll.data.datasets import named_sources
from roll.platform.machine import cores
from roll.rollout.single_turn import group_seed
from roll.rollout.types import GroupTask
from roll.strategy.backend_setup import EngineSetup
from roll.strategy.vllm.engine import VllmEngine, prepared_arguments
from roll.strategy.vllm.outputs.gathered import GATHERS
from roll.strategy.vllm.translate import sampling_params

ROWS = 8
"""Number of rows in a micro-batch."""


class BareVllm:
    """vLLM as it is, with limits and cores of a run; except that its processes sleep between
    messages, so that they leave the cores to the trainer."""

    def __init__(self, config: VllmConfig, setup: EngineSetup) -> None:
        self.config = config
        self.setup = setup
        self.engine: Any = None

    async def start(self) -> None:
        os.environ[GATHERS] = "0"
        arguments = prepared_arguments(self.config, self.setup)
        for ours in ("worker_extension_cls", "distributed_executor_backend"):
            del arguments[ours]
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        last = None
        async for output in self.engine.generate(
            {"prompt_token_ids": list(request.prompt_tokens)}, sampling_params(request), request.id
        ):
            last = output
        assert last is not None
        written = sorted(last.outputs, key=lambda each: int(each.index))
        return [
            Completion.of(
                each.token_ids,
                each.logprobs.logprobs,
                VersionRuns.of_starts([(0, 0)], len(each.token_ids)),
                FinishReason(each.finish_reason),
            )
            for each in written
        ]

    async def close(self) -> None:
        self.engine.shutdown()


ENGINES: dict[str, type[BareVllm] | type[VllmEngine]] = {"vllm": BareVllm, "roll": VllmEngine}


class Parts:
    """Engine and trainer of a run file, without anything around them.

    Args:
        engine: a key of `ENGINES`.
        file: the run file.
    """

    def __init__(self, engine: str, file: Path) -> None:
        config = load_config(file).config
        assert isinstance(config, RlvrConfig)
        self.config = config
        path = config.train_model.path
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0)
        ((name, source),) = named_sources(config.data.sources).items()
        texts = [json.loads(line)["prompt"] for line in Path(source.path).read_text().splitlines()]
        self.prompts = [
            Prompt(f"{name}:{row}", tuple(self.tokenizer(text).input_ids), text, answer="", tag="")
            for row, text in enumerate(texts)
        ]
        spec = WorkerSpec(Role.ACTOR_INFER, 0, 1, (0,), cores(), 0, "127.0.0.1:1", 0, "cpu")
        setup = EngineSetup(
            spec=spec,
            model=config.train_model,
            dtype="float32",
            max_model_len=config.max_sequence_tokens,
        )
        assert isinstance(config.actor_infer.strategy, VllmConfig)
        self.engine = ENGINES[engine](config.actor_infer.strategy, setup)

    async def generate(self, step: int) -> list[list[tuple[tuple[int, ...], list[int]]]]:
        """Answer the prompts of a step; return prompt and response of each sample, by prompt."""
        count, siblings = self.config.data.prompts_per_step, self.config.data.samples_per_prompt
        sampling = SamplingParams(**self.config.sampling.model_dump())
        requests = []
        for prompt in self.prompts[step * count : (step + 1) * count]:
            # Prompts and seeds are those of the run, so that both sides write the same tokens: with
            # other lengths, one side would have longer steps.
            name = GroupTask(prompt, step).group_id
            seed = group_seed(self.config.seed, name)
            requests.append(GenerateRequest(name, prompt.tokens, sampling, siblings, seed))
        found = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        return [
            [(tuple(request.prompt_tokens), list(completion.tokens)) for completion in completions]
            for request, completions in zip(requests, found, strict=True)
        ]

    def train(self, groups: list[list[tuple[tuple[int, ...], list[int]]]]) -> None:
        """Do one optimizer step of GRPO on the samples."""
        rows = []
        for group in groups:
            scores = torch.tensor(
                [share_of_digits(self.tokenizer.decode(response)) for _, response in group]
            )
            advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
            rows += [(*row, float(each)) for row, each in zip(group, advantages, strict=True)]
        rows.sort(key=lambda row: len(row[1]))
        for begin in range(0, len(rows), ROWS):
            (self._loss(rows[begin : begin + ROWS]) / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, rows: list[tuple[tuple[int, ...], list[int], float]]) -> Tensor:
        """Return the sum over rows of the mean loss of their responses; the policy has just written
        them, so all ratios are 1."""
        width = max(len(prompt) + len(response) for prompt, response, _ in rows)
        tokens_BT = torch.zeros(len(rows), width, dtype=torch.long)
        mask_BT = torch.zeros(len(rows), width)
        for i, (prompt, response, _) in enumerate(rows):
            whole = [*prompt, *response]
            tokens_BT[i, : len(whole)] = torch.tensor(whole)
            mask_BT[i, len(prompt) : len(whole)] = 1 / len(response)
        logits_BTV = self.model(tokens_BT, use_cache=False).logits[:, :-1]
        logprobs_BT = -torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="none"
        ).view(len(rows), -1)
        ratios_BT = (logprobs_BT - logprobs_BT.detach()).exp()
        advantages_B = torch.tensor([advantage for *_, advantage in rows])
        return -(ratios_BT * mask_BT[:, 1:] * advantages_B[:, None]).sum()

    async def run(self, steps_file: Path) -> None:
        """Do all steps; write a line behind each of them."""
        await self.engine.start()
        with steps_file.open("a") as file:
            for step in range(self.config.max_steps):
                begun = time.perf_counter()
                groups = await self.generate(step)
                took_s = time.perf_counter() - begun
                self.train(groups)
                lengths = [len(response) for group in groups for _, response in group]
                said = {
                    "time/rollout_s": took_s,
                    "response_tokens/mean": sum(lengths) / len(lengths),
                }
                file.write(json.dumps(said) + "\n")
                file.flush()
        await self.engine.close()


if __name__ == "__main__":
    asyncio.run(Parts(sys.argv[1], Path(sys.argv[2])).run(Path(sys.argv[3])))
