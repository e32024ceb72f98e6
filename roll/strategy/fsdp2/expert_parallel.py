"""Expert parallelism (arXiv 2006.16668): ranks share the experts of a layer.

Each rank has its own tokens and some of the experts. Before the experts, a rank sends each token to
the ranks that have the experts which the router has chosen for it; afterwards it gets the results
back, weighs and adds them. The module of the experts itself computes as it does without that, with
fewer experts. Hence the gradient of an expert on its rank is already the sum over all tokens of the
ranks that share the layer, and FSDP adds up those of the other ranks with the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from roll.core.errors import ConfigError
from roll.models.deferred.tensor import Deferred, fill


def check(model: PreTrainedModel, ranks: int) -> None:
    """Raise ConfigError unless `ranks` ranks can share the experts of each layer of the model."""
    kind = model.config.get_text_config().model_type
    found = fused(model)
    if not found:
        raise ConfigError(
            f"ep: model type {kind!r} has no experts that transformers keeps in one tensor for "
            "all; leave out `ep`, or use kind: megatron"
        )
    for experts in found:
        number = int(experts.num_experts)
        if number % ranks:
            raise ConfigError(
                f"ep: {number} experts of a layer of model type {kind!r} do not divide over "
                f"{ranks} ranks; set `ep` to a divisor of {number}"
            )
        strange = [name for name, p in experts.named_parameters() if p.shape[:1] != (number,)]
        if strange:
            raise ConfigError(
                f"ep: {strange[0]} of model type {kind!r} is no tensor of {number} experts; leave "
                "out `ep`"
            )


def fused(part: nn.Module) -> list[Any]:
    """List the modules of `part` that hold all experts of a layer in common tensors. Their inputs
    are hidden states `[T, D]`, indices `[T, K]` of the chosen experts, and weights `[T, K]`."""
    # transformers' `use_experts_implementation` sets both attributes.
    marks = ("has_gate", "is_transposed")
    return [module for module in part.modules() if all(hasattr(module, mark) for mark in marks)]


def cut(experts: Any, mesh: DeviceMesh) -> None:
    """Keep this rank's part of a layer's experts, and let the ranks of `mesh` exchange tokens.

    A parameter that is still in its files is read here, but for the experts of other ranks.

    Args:
        experts: one of the modules of `fused`.
    """
    number, own = experts.num_experts // mesh.size(), mesh.get_local_rank()
    for name, p in list(experts.named_parameters()):
        part = nn.Parameter(p.detach()[number * own : number * (own + 1)], requires_grad=False)
        if isinstance(part, Deferred):
            fill(part, part.dtype, part.device)
        placed = DTensor.from_local(
            part.detach(), mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
        )
        setattr(experts, name, nn.Parameter(placed, requires_grad=p.requires_grad))
    experts.num_experts = number
    exchange = _TokenExchange(mesh.get_group(), number)
    experts.register_forward_pre_hook(exchange.send)
    experts.register_forward_hook(exchange.take_back)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Record of the tokens that a forward pass has sent, to order what comes back."""

    weights_TK: Tensor
    """Weights of the experts of each token of this rank."""
    places_S: Tensor
    """Places among the T * K choices of an expert by a token, in the order in which they were sent:
    by expert. A choice of none (index E) is not sent."""
    to_ranks: list[int]
    """Number of tokens that each rank got from this one."""
    from_ranks: list[int]
    """Number of tokens that this rank got from each."""


class _TokenExchange:
    """Hooks of a module of experts that send its inputs to other ranks, and the results back."""

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        """
        Args:
            group: ranks that share the experts, in their order.
            number: number of experts of each rank.
        """
        self._group = group
        self._number = number
        self._sent: _Sent | None = None

    def send(
        self, experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of this rank's experts: tokens `[M, D]` of all ranks, one expert for
        each, and weights of one. Collective, also for a rank without tokens."""
        hidden_TD, index_TK, weights_TK = inputs
        ranks, choices = self._group.size(), index_TK.flatten()
        counts_E = torch.bincount(choices, minlength=ranks * self._number)[: ranks * self._number]
        told_RE = counts_E.view(ranks, self._number)
        heard_RE = torch.empty_like(told_RE)
        dist.all_to_all_single(heard_RE, told_RE, group=self._group)
        to_ranks, from_ranks = torch.stack((told_RE.sum(1), heard_RE.sum(1))).tolist()
        places_S = choices.argsort(stable=True)[: sum(to_ranks)]
        self._sent = _Sent(weights_TK, places_S, to_ranks, from_ranks)
        # FSDP has gathered parameters that know of the other ranks' experts; the module computes
        # with plain tensors. Attributes of an object come before its parameters.
        for name, p in experts.named_parameters():
            assert isinstance(p, DTensor)
            vars(experts)[name] = p.to_local()
        chosen_SD = hidden_TD[places_S // index_TK.shape[1]]
        rows_MD = _Exchange.apply(chosen_SD, to_ranks, from_ranks, self._group)
        # In the order of the ranks, and for each rank in the order of the experts.
        own_RE = torch.arange(self._number, device=choices.device).expand(ranks, -1)
        expert_M = own_RE.flatten().repeat_interleave(
            heard_RE.flatten(), output_size=sum(from_ranks)
        )
        if not sum(from_ranks):
            # Without a token the parameters would have no gradient here, and FSDP's reduction of
            # those of other ranks would wait. The result of this one is dropped.
            rows_MD = torch.cat((rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])))
            expert_M = expert_M.new_zeros(1)
        return rows_MD, expert_M[:, None], rows_MD.new_ones(len(rows_MD), 1)

    def take_back(self, experts: nn.Module, inputs: Any, results_MD: Tensor) -> Tensor:
        """Return the weighted sums of the results of this rank's tokens, `[T, D]`. Collective."""
        sent, self._sent = self._sent, None
        assert sent is not None, "the tokens were not sent"
        for name, _ in experts.named_parameters():
            del vars(experts)[name]
        results_MD = results_MD[: sum(sent.from_ranks)]
        mine_SD = _Exchange.apply(results_MD, sent.from_ranks, sent.to_ranks, self._group)
        width = mine_SD.shape[1]
        whole = mine_SD.new_zeros(sent.weights_TK.numel(), width)
        chosen_TKD = whole.index_copy(0, sent.places_S, mine_SD).view(*sent.weights_TK.shape, width)
        return (chosen_TKD * sent.weights_TK[..., None]).sum(1).to(results_MD.dtype)


class _Exchange(torch.autograd.Function):
    """Collective exchange of rows: each rank sends the others some of its own, one behind another.
    Gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Send the first `sent[0]` rows to the first rank, the next to the second; return the rows that
    this rank gets, in the order of the ranks. Collective.

    Args:
        received: number of rows that each rank sends to this one.
        group: the ranks; None: all.
    """
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found
