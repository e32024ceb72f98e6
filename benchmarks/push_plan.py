"""How many broadcasts a push of a large model takes, how long it takes to plan it, and what its
process groups cost.

The tensors are those of three models of Qwen3, in bfloat16, as FSDP2 cuts them over the ranks of a
trainer. For each the script prints the number of tensors, of broadcasts (one for each bucket), of
runs that the senders hold (each would be a broadcast if no sender gathered), and the time that a
process takes to plan its first push and a further one.

Then processes of this machine push a few tensors to each other, by gloo, one push after another:
to some of them with groups that each push makes anew (`weight_sync.kept_groups: 0`), to others with
groups that stay. Printed are the time of the first push and of further ones, from the call to the
use of the weights; the tensors are so small that most of it is the way to the first byte.

    python benchmarks/push_plan.py [--ranks 2+2,4+4] [--pushes 20]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.weight_sync import Task, Team, answer, serve
from roll.weight_sync.manifest import Manifest, TensorMeta, even_cuts
from roll.weight_sync.push_plan import layout, runs
from roll.weight_sync.transport_choice import DEFAULT_BUCKET_BYTES, new_channel


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model, from its config, and of its trainer."""

    name: str
    senders: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    """Width of the MLP, or of an expert."""
    experts: int = 0
    head_dim: int = 128
    vocabulary: int = 151936

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            begin = f"model.layers.{layer}"
            yield f"{begin}.input_layernorm.weight", (self.hidden,)
            for name, shape in {
                "q_proj": (q, self.hidden),
                "k_proj": (kv, self.hidden),
                "v_proj": (kv, self.hidden),
                "o_proj": (self.hidden, q),
                "q_norm": (self.head_dim,),
                "k_norm": (self.head_dim,),
            }.items():
                yield f"{begin}.self_attn.{name}.weight", shape
            yield f"{begin}.post_attention_layernorm.weight", (self.hidden,)
            yield from self._mlp(f"{begin}.mlp")
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _mlp(self, begin: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors of the MLP of a layer, or of its router and its experts."""
        each = [begin]
        if self.experts:
            yield f"{begin}.gate.weight", (self.experts, self.hidden)
            each = [f"{begin}.experts.{expert}" for expert in range(self.experts)]
        for name in each:
            yield f"{name}.gate_proj.weight", (self.inner, self.hidden)
            yield f"{name}.up_proj.weight", (self.inner, self.hidden)
            yield f"{name}.down_proj.weight", (self.hidden, self.inner)


MODELS = (
    Sizes("32B", 64, 64, 5120, 64, 8, 25600),
    Sizes("30B-A3B", 16, 48, 2048, 32, 4, 768, experts=128),
    Sizes("235B-A22B", 32, 94, 4096, 64, 4, 1536, experts=128),
)


def manifest_of(sizes: Sizes) -> Manifest:
    """Return the manifest of a push of the model."""
    tensors = list(sizes.tensors())
    cuts = [
        even_cuts(shape[0], shape[1] if len(shape) > 1 else 1, sizes.senders)
        for _, shape in tensors
    ]
    metas = tuple(TensorMeta(name, shape, "bfloat16") for name, shape in tensors)
    return Manifest(metas, tuple(cuts))


TENSORS = {f"layers.{layer}.mlp.up.weight": (64, 64) for layer in range(4)}


def member(pipe: Connection, index: int, sends: bool) -> None:
    """Take part in pushes as sender or receiver number `index`; answer with the seconds of each,
    and the number of groups that were made."""
    import torch

    from roll.weight_sync.transfer import receive, send

    torch.set_num_threads(1)

    def take_part(task: Task) -> dict[str, Any]:
        channel = task["channel"]
        begun, made = time.perf_counter(), 0
        if sends:
            cuts = tuple(even_cuts(*shape, channel.num_senders) for shape in TENSORS.values())
            manifest = Manifest(
                tuple(TensorMeta(name, shape, "float32") for name, shape in TENSORS.items()), cuts
            )
            parts = (
                (name, torch.ones(cut[index + 1] - cut[index]))
                for name, cut in zip(TENSORS, cuts, strict=True)
            )
            made = send(channel, parts, manifest, verify=False, sender=index).groups_made
        else:
            with receive(channel, index, check=lambda manifest: None) as incoming:
                for _ in incoming.tensors():
                    pass
        return {"seconds": time.perf_counter() - begun, "made": made}

    serve(pipe, take_part)


def push_once(team: Team, senders: int, kept_groups: int) -> tuple[float, int]:
    """Return the seconds of a push in the leading sender, and the number of groups it made."""
    channel = new_channel(
        "broadcast",
        num_senders=senders,
        num_receivers=len(team.pipes) - senders,
        timeout_s=60,
    )
    for pipe in team.pipes:
        pipe.send({"channel": replace(channel, kept_groups=kept_groups)})
    found = [answer(pipe) for pipe in team.pipes]
    return found[0]["seconds"], found[0]["made"]


def measure_groups(senders: int, receivers: int, pushes: int) -> None:
    """Print the time of pushes between that many processes, in turns with and without kept
    groups."""
    teams = {"made anew": (Team(), 0), "kept": (Team(), 6)}
    for team, _ in teams.values():
        for index in range(senders):
            team.start(member, index, True)
        for index in range(receivers):
            team.start(member, index, False)
        team.ready()
    took: dict[str, list[tuple[float, int]]] = {name: [] for name in teams}
    for _ in range(pushes + 1):
        for name, (team, kept_groups) in teams.items():
            took[name].append(push_once(team, senders, kept_groups))
    for name, (team, _) in teams.items():
        first, *further = took[name]
        print(
            f"{senders} senders, {receivers} receivers, groups {name}: first push {first[0]:.3f} s "
            f"({first[1]} groups made), then {median(each for each, _ in further):.3f} s "
            f"({sum(made for _, made in further)} made in {len(further)} pushes)"
        )
        team.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="see the docstring of this file")
    parser.add_argument("--ranks", default="2+2,4+4", help="senders+receivers of the pushes")
    parser.add_argument("--pushes", type=int, default=20, help="after the first one")
    args = parser.parse_args()
    bucket_bytes = DEFAULT_BUCKET_BYTES["broadcast"]
    for sizes in MODELS:
        manifest = manifest_of(sizes)
        took = []
        for _ in range(2):
            begun = time.perf_counter()
            buckets = layout(manifest, bucket_bytes, full=True)
            took.append(time.perf_counter() - begun)
        held = sum(
            len(runs(manifest, bucket, sender))
            for bucket in buckets
            for sender in range(sizes.senders)
        )
        goal = manifest.num_bytes / bucket_bytes + sizes.senders
        print(
            f"{sizes.name} on {sizes.senders} senders: {len(manifest.tensors)} tensors, "
            f"{manifest.num_bytes / 1e9:.0f} GB; {len(buckets)} broadcasts (goal {goal:.0f}) of "
            f"{held} runs; planned in {took[0]:.3f} s, again in {took[1]:.3f} s"
        )
    for ranks in args.ranks.split(","):
        senders, receivers = map(int, ranks.split("+"))
        measure_groups(senders, receivers, args.pushes)


if __name__ == "__main__":
    main()
