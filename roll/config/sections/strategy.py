"""Settings of backends that train or score, one class each; a role selects one by `kind`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config


class HfScoreConfig(Config):
    """Plain Hugging Face forward passes; the results of all other backends are tested against
    these."""

    kind: Literal["hf"] = "hf"


class Fsdp2Config(Config):
    """PyTorch FSDP2, which shards parameters, gradients and optimizer state over the ranks."""

    kind: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer after each forward pass and each backward pass. False
    keeps them until the update: this needs more memory, and one gather per update instead of two
    per micro-batch."""
    activation_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass, to save memory."""
    offload_activations: bool = False
    """Keep what activation_checkpointing saves of each layer, its input, in host memory until the
    backward pass needs it, for long rows. Needs activation_checkpointing."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduction across ranks."""
    ulysses: int = Field(default=1, ge=1)
    """Number of ranks that share each row (Ulysses, arXiv 2309.14509): each has a slice of the
    tokens, and in attention they exchange tokens for heads. For rows that are too long for one
    rank."""
    tp: int = Field(default=1, ge=1)
    """Number of ranks that share each matrix of attention and MLP, and each row (tensor
    parallelism)."""
    ep: int = Field(default=1, ge=1)
    """Number of ranks that share the experts of a layer (expert parallelism): they send tokens to
    the ranks that have their experts, so less is gathered. Each rank has rows of its own."""
    replicas: int = Field(default=1, ge=1)
    """Number of copies of the model, each sharded over a part of the ranks (HSDP). Parameters are
    gathered within a copy, for example on one node; gradients are summed over all ranks."""

    @property
    def ranks_per_part(self) -> int:
        """Number of devices that get the same part of a batch."""
        return self.ulysses * self.tp

    @property
    def sizes(self) -> list[tuple[int, str]]:
        """Numbers that must divide that of the ranks, with their formulas for messages."""
        found = [
            (self.ulysses * self.tp, "ulysses * tp"),
            (self.replicas * self.tp, "replicas * tp"),
        ]
        return [*found, (self.replicas * self.ep, "replicas * ep")] if self.ep > 1 else found

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse `offload_activations` without `activation_checkpointing`, and `ep` with `tp`."""
        _require_checkpointing(self)
        if self.ep > 1 and self.tp > 1:
            raise ValueError(
                f"ep is {self.ep} and tp is {self.tp}: fsdp2 cuts no layer that has experts by tp; "
                "leave one of them out, or use kind: megatron, which does both"
            )
        return self


class DeepspeedConfig(Config):
    """DeepSpeed ZeRO, which shards the training state over the ranks, by stages."""

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage, which says what is sharded. 0: nothing (in bfloat16: as 1). 1: float32 weights
    and moments of the optimizer. 2: gradients, too. 3: parameters, too. A frozen model is sharded
    with 3, and otherwise whole on every rank."""
    offload_optimizer: bool = False
    """Keep the optimizer's float32 weights and moments in host memory and update them there; needs
    stage 1 or above."""
    offload_parameters: bool = False
    """Keep this rank's shard of the parameters in host memory; needs stage 3."""
    activation_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass, to save memory."""
    offload_activations: bool = False
    """Keep what activation_checkpointing saves of each layer, its input, in host memory until the
    backward pass needs it, for long rows. Needs activation_checkpointing."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduction across ranks."""
    bucket_elements: int = Field(default=50_000_000, ge=1)
    """Number of elements that one reduction or gather handles at once. A buffer of this size always
    exists."""
    whole_below_elements: int = Field(default=100_000, ge=0)
    """Number of elements up to which a parameter stays whole on every rank, which saves small
    gathers; only for stage 3."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        """Refuse an optimizer offload at stage 0, at any stage but 3 a parameter offload and a size
        up to which parameters stay whole, and activations in host memory that are not recomputed.
        """
        _require_checkpointing(self)
        if self.offload_optimizer and self.stage == 0:
            raise ValueError(
                "offload_optimizer needs stage 1 or above; raise stage or leave it out"
            )
        if self.offload_parameters and self.stage != 3:
            raise ValueError(
                f"offload_parameters needs stage 3, stage is {self.stage}; set stage: 3 or leave "
                "it out"
            )
        if self.changed("whole_below_elements") and self.stage != 3:
            raise ValueError(
                f"whole_below_elements: stage {self.stage} divides no parameters; set stage: 3 or "
                "leave it out"
            )
        return self


def _require_checkpointing(strategy: Fsdp2Config | DeepspeedConfig) -> None:
    """Raise ValueError for `offload_activations` without `activation_checkpointing`."""
    if strategy.offload_activations and not strategy.activation_checkpointing:
        raise ValueError(
            "offload_activations moves the inputs of layers, and without activation_checkpointing "
            "everything else that layers compute stays on the device; set "
            "activation_checkpointing: true, or leave offload_activations out"
        )


class MegatronConfig(Config):
    """Megatron-Core, which divides layers over tensor, pipeline and expert parallel ranks.

    The remaining ranks are data parallel: tp 2 and pp 2 on eight devices make two copies of the
    model.
    """

    kind: Literal["megatron"] = "megatron"
    tp: int = Field(default=1, ge=1)
    """Number of ranks that share each matrix (tensor parallelism)."""
    pp: int = Field(default=1, ge=1)
    """Number of stages that the layers are divided over (pipeline parallelism)."""
    vpp: int = Field(default=1, ge=1)
    """Number of chunks of layers on each stage, which take turns: stages idle less and exchange
    more."""
    cp: int = Field(default=1, ge=1)
    """Number of ranks that share the tokens of each row (context parallelism): each has two pieces
    of it (of packed rows, of each sequence), and in attention they exchange tokens for heads. For
    rows that are too long for one rank; for models without linear or sparse attention and without
    pictures."""
    ep: int = Field(default=1, ge=1)
    """Number of ranks that share the experts of a layer (expert parallelism)."""
    etp: int | None = Field(default=None, ge=1)
    """Number of ranks that share each matrix of an expert. If left out: tp."""
    layers: tuple[int, ...] | None = None
    """Number of layers of each of the pp * vpp chunks, in the order of the model. If left out: the
    same number for each chunk."""
    sequence_parallel: bool | None = None
    """Divide norms and residuals over the tensor parallel ranks, too. If left out: true where there
    are experts or latent attention and tp is above 1."""
    recompute: Literal["none", "attention", "full"] = "none"
    """Activations that the backward pass computes again to save memory: none, those of attention,
    or those of whole layers."""
    distributed_optimizer: bool = False
    """Each data parallel rank keeps and updates only a part of the optimizer's float32 weights and
    moments. This needs less memory if several ranks hold the same weights; the weights are gathered
    after each update."""
    overlap_grad_reduce: bool = False
    """Begin to add up gradients over data parallel ranks, bucket by bucket of about 40 million
    elements, while the backward pass of the last micro-batch goes on. Not while a vision part is
    trained, which gets no gradients from text."""
    overlap_param_gather: bool = False
    """Gather the weights that distributed_optimizer has updated bucket by bucket, while the first
    forward pass after the update goes on. Needs overlap_grad_reduce and distributed_optimizer."""
    aux_loss_coef: float = Field(default=0.0, ge=0)
    """Factor of the loss that balances the load of experts (arXiv 2101.03961), of which padding has
    no part: the mean over the micro-batches of all ranks. This loss is not part of
    `loss/total`."""
    mtp_loss_weight: float | None = Field(default=None, gt=0)
    """Factor of the loss of the model's layers that predict further tokens (MTP), which trains them
    beside the policy: their cross-entropy on the trained tokens, weighted as the policy's loss,
    the mean over the layers. Without the factor it is `loss/mtp`, which is not part of
    `loss/total`. For actor_train. null: these layers are neither built nor trained."""
    mtp_detached: bool = True
    """The loss of these layers trains them alone, and their gradient is limited by a norm of its
    own: embedding, head and all other layers learn as they do without. False: it trains the whole
    model, as in pre-training (arXiv 2412.19437)."""

    @property
    def ranks_per_part(self) -> int:
        """Number of devices that get the same part of a batch."""
        return self.tp * self.cp * self.pp

    @model_validator(mode="after")
    def _check_further_layers(self) -> Self:
        """Refuse what does not go together with layers that predict further tokens."""
        if self.mtp_loss_weight is None:
            if not self.mtp_detached:
                raise ValueError(
                    "mtp_detached is false, and without mtp_loss_weight no layer predicts further "
                    "tokens; set it, or leave mtp_detached out"
                )
            return self
        if self.cp > 1:
            raise ValueError(
                f"mtp_loss_weight is for ranks with whole rows, and cp is {self.cp}; leave one of "
                "them out"
            )
        if self.overlap_grad_reduce:
            raise ValueError(
                "mtp_loss_weight: of layers that are trained alone, some weights get no gradient, "
                "for which overlap_grad_reduce would wait; leave one of them out"
            )
        if self.aux_loss_coef:
            raise ValueError(
                "mtp_loss_weight: the layers that predict further tokens cannot leave padding out "
                "of the loss that balances experts (aux_loss_coef); leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        """Refuse an overlapped gather without an overlapped reduction, which makes its buckets, or
        of weights that every rank updates itself."""
        needs = ("distributed_optimizer", "overlap_grad_reduce")
        lacks = [key for key in needs if not getattr(self, key)]
        if self.overlap_param_gather and lacks:
            raise ValueError(
                f"overlap_param_gather gathers in buckets of overlap_grad_reduce what "
                f"distributed_optimizer has updated; set {' and '.join(lacks)}: true, or leave it "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Refuse `vpp` without pipeline stages, `layers` not of one number per chunk, and
        `sequence_parallel` without `tp`."""
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"vpp is {self.vpp} but pp is 1: chunks take turns between stages; raise pp or "
                "leave vpp out"
            )
        if self.layers is not None and len(self.layers) != self.pp * self.vpp:
            raise ValueError(
                f"layers names {len(self.layers)} chunks, expected pp * vpp = "
                f"{self.pp * self.vpp}; give one number of layers for each"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp above 1; raise tp or leave it out")
        return self


TrainStrategyConfig = Annotated[
    Fsdp2Config | DeepspeedConfig | MegatronConfig, Field(discriminator="kind")
]
ScoreStrategyConfig = Annotated[
    HfScoreConfig | Fsdp2Config | DeepspeedConfig | MegatronConfig, Field(discriminator="kind")
]


def row_cuts(strategy: ScoreStrategyConfig) -> list[str]:
    """Return the keys of a backend that give each rank a slice of a row only."""
    if not isinstance(strategy, Fsdp2Config):
        return []
    return [key for key in ("ulysses", "tp") if getattr(strategy, key) > 1]
