"""How many broadcasts a push of a large model takes, and how long it takes to plan it.

The tensors are those of three models of Qwen3, in bfloat16, as FSDP2 cuts them over the ranks of a
trainer. For each the script prints the number of tensors, of broadcasts (one for each bucket), of
runs that the senders hold (each would be a broadcast if no sender gathered), and the time that a
process takes to plan its first push and a further one.

    python benchmarks/push_plan.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from roll.weight_sync.manifest import Manifest, TensorMeta, even_cuts
from roll.weight_sync.push_plan import layout, runs
from roll.weight_sync.transport_choice import DEFAULT_BUCKET_BYTES


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


def main() -> None:
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


if __name__ == "__main__":
    main()
