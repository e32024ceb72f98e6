"""Run files of other frameworks: every shape gives a valid run file that means the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from roll.cli import app
from roll.config import load_config
from roll.config.agentic import AgenticConfig
from roll.config.errors import ConfigError
from roll.config.offline import DistillationConfig, DpoConfig, RewardModelConfig, SftConfig
from roll.config.rlvr import RlvrConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.optimizers.kinds import MuonConfig
from roll.config.sections.roles import Role
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig
from roll.migrate.translate import Migration, migrate

FILES = Path(__file__).parents[2] / "golden" / "migrate"
SHAPES = sorted(path.stem for path in FILES.glob("*.yaml") if path.stem not in ("envs", "made"))


def loaded(made: Migration, folder: Path) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(made.text)
    return load_config(path).config


def of(name: str, folder: Path) -> RunConfig:
    return loaded(migrate(FILES / f"{name}.yaml"), folder)


def changed(folder: Path, name: str, **keys: Any) -> Path:
    """Write a shape with other values of some keys; `a__b` stands for `a.b`, None for null."""
    tree = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    for key, value in keys.items():
        *around, last = key.split("__")
        node = tree
        for part in around:
            node = node.setdefault(part, {})
        node[last] = value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    (folder / "envs.yaml").write_text((FILES / "envs.yaml").read_text())
    return path


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_a_valid_run_file(name: str, tmp_path: Path) -> None:
    made = migrate(FILES / f"{name}.yaml")
    assert loaded(made, tmp_path).pools, made.text


@pytest.mark.parametrize("name", SHAPES)
def test_every_key_of_a_shape_is_translated_or_named(name: str) -> None:
    made = migrate(FILES / f"{name}.yaml")
    for key in keys_of(yaml.safe_load((FILES / f"{name}.yaml").read_text())):
        assert key in made.text, key


def keys_of(node: Any, at: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [at]
    found = []
    for key, value in node.items():
        if key not in ("defaults",):
            found += keys_of(value, f"{at}.{key}" if at else str(key))
    return found


def test_a_file_is_translated_as_it_was_before() -> None:
    made = migrate(FILES / "rlvr.yaml")
    golden = FILES / "made" / "rlvr.yaml"
    assert made.text == golden.read_text(), "look at each difference; then write it there"


def test_layers_that_predict_further_tokens_are_kept_or_trained(tmp_path: Path) -> None:
    key = "actor_train__strategy_args__strategy_config__mtp_num_layers"
    made = migrate(changed(tmp_path, "rlvr", **{key: 1}))
    (line,) = (line for line in made.text.splitlines() if key.replace("__", ".") in line)
    assert "saved models have those of `model.path`" in line

    def strategy(**keys: Any) -> MegatronConfig:
        told = {key: 1, **{f"actor_train__{name}": value for name, value in keys.items()}}
        config = loaded(migrate(changed(tmp_path, "rlvr", **told)), tmp_path)
        found = config.trained[Role.ACTOR_TRAIN].strategy
        assert isinstance(found, MegatronConfig)
        return found

    assert strategy(mtp_training_mode="disabled").mtp_loss_weight is None
    alone = strategy(mtp_training_mode="standalone")
    assert (alone.mtp_loss_weight, alone.mtp_detached) == (0.3, True)
    joint = strategy(mtp_training_mode="joint", mtp_loss_scaling_factor=0.1)
    assert (joint.mtp_loss_weight, joint.mtp_detached) == (0.1, False)
    # What cannot be trained beside them is named.
    aux = {"model_args__moe_aux_loss_coef": 0.01, "mtp_training_mode": "joint"}
    assert strategy(**aux).aux_loss_coef == 0


def test_numbers_of_a_step_keep_their_units(tmp_path: Path) -> None:
    config = of("rlvr", tmp_path)
    assert isinstance(config, RlvrConfig)
    assert (config.data.prompts_per_step, config.data.samples_per_prompt) == (64, 8)
    # One row on each of 8 ranks (16 devices, tensor parallel 2), 32 times: 256 of 512 samples.
    assert config.actor_train.samples_per_update == 256
    assert config.updates_per_step() == 2
    assert config.actor_train.max_tokens_per_microbatch == 2048 + 4096
    assert config.reference_role is not None
    assert config.reference_role.max_tokens_per_microbatch == 8 * (2048 + 4096)
    assert config.num_devices("actor_infer") == 12
    assert config.pools[config.actor_infer.pool] == "0-11"


def test_an_algorithm_keeps_its_numbers_and_their_order(tmp_path: Path) -> None:
    config = of("rlvr", tmp_path)
    assert isinstance(config, RlvrConfig)
    algorithm = config.algorithm.model_dump(mode="json", exclude_defaults=True)
    assert config.algorithm.advantage.model_dump()["gamma"] == 1
    assert config.algorithm.advantage.kind == "reinforce"
    normalize, clip = algorithm["reward_shaping"]
    assert (normalize["mean"], normalize["std"]) == ("group", "batch")
    assert (clip["low"], clip["high"]) == (-10, 10)
    assert [part.kind for part in config.algorithm.advantage_shaping] == ["whiten", "clip"]
    ppo, kl = config.algorithm.loss
    assert (ppo.kind, kl.kind) == ("ppo_clip", "kl")
    assert ppo.model_dump()["dual_clip"] == pytest.approx(1.4)
    assert kl.model_dump()["coef"] == 0.001
    assert config.algorithm.kl_in_reward is None
    assert config.algorithm.aggregation == "sequence_mean"
    assert [mask.kind for mask in config.algorithm.masks] == ["overlong", "difficulty"]


def test_defaults_that_differ_are_written_out(tmp_path: Path) -> None:
    path = changed(tmp_path, "rlvr", actor_infer__generating_args={}, seed=None)
    made = migrate(path)
    config = loaded(made, tmp_path)
    assert isinstance(config, RlvrConfig)
    assert (config.sampling.temperature, config.sampling.top_p) == (0.95, 0.7)
    assert (config.sampling.top_k, config.seed, config.resume) == (50, 42, "never")
    assert "temperature: 0.95  # default" in made.text


@pytest.mark.parametrize(
    ("name", "advantage"),
    [("gae", "gae"), ("grpo", "reinforce"), ("reinforce", "reinforce"), ("gigpo", "gigpo")],
)
def test_estimators(name: str, advantage: str, tmp_path: Path) -> None:
    shape = "agentic" if name == "gigpo" else "rlvr"
    config = loaded(migrate(changed(tmp_path, shape, adv_estimator=name)), tmp_path)
    assert isinstance(config, RlvrBase)
    assert config.algorithm.advantage.kind == advantage
    assert (config.critic is not None) == (name == "gae")


@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        (
            "verl",
            {
                "algorithm__adv_estimator": "gae",
                "critic__strategy": "megatron",
                "critic__megatron__tensor_model_parallel_size": 2,
            },
        ),
        (
            "rlvr",
            {
                "adv_estimator": "gae",
                "critic__strategy_args__strategy_name": "megatron_train",
                "critic__strategy_args__strategy_config__tensor_model_parallel_size": 2,
            },
        ),
    ],
)
def test_a_critic_on_megatron_stays_there(shape: str, keys: dict[str, Any], tmp_path: Path) -> None:
    made = migrate(changed(tmp_path, shape, **keys))
    config = loaded(made, tmp_path)
    assert isinstance(config, RlvrBase)
    assert config.critic is not None
    assert config.critic.strategy.kind == "megatron"
    assert config.critic.strategy.tp == 2
    assert "in place of megatron" not in made.text


def test_gigpo_is_without_what_changes_the_rewards_of_all_turns(tmp_path: Path) -> None:
    kl = {"add_token_level_kl": True, "init_kl_coef": 0.1}
    made = migrate(changed(tmp_path, "agentic", adv_estimator="gigpo", reward_clip=2, **kl))
    config = loaded(made, tmp_path)
    assert isinstance(config, RlvrBase)
    assert config.algorithm.reward_shaping == ()
    assert config.algorithm.kl_in_reward is None
    assert "gigpo reads rewards of turns, which nothing clips" in made.text
    assert "a term `kl` in place of the penalty" in made.text


def test_grpo_without_a_clip_in_between_is_ours(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        "rlvr",
        adv_estimator="grpo",
        norm_std_type=None,
        norm_mean_type=None,
        reward_clip=None,
    )
    config = loaded(migrate(path), tmp_path)
    assert isinstance(config, RlvrConfig)
    assert config.algorithm.advantage.kind == "grpo"
    assert config.algorithm.reward_shaping == ()


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("topr", "topr"), ("cispo", "cispo"), ("kimi15", "kimi"), ("vanilla", "pg"), ("tis", "cispo")],
)
def test_policy_losses(variant: str, kind: str, tmp_path: Path) -> None:
    config = loaded(migrate(changed(tmp_path, "rlvr", actor_train__pg_variant=variant)), tmp_path)
    assert isinstance(config, RlvrConfig)
    assert config.algorithm.loss[0].kind == kind


def test_gspo_and_the_correction_of_the_engine(tmp_path: Path) -> None:
    weight = {"enabled": True, "weight_type": "sequence", "upper_bound": 1.5}
    rule = {
        "enabled": True,
        "agg_type": "segment",
        "ratio_enabled": True,
        "ratio_low": 0.5,
        "ratio_high": 2,
    }
    path = changed(
        tmp_path,
        "rlvr",
        importance_sampling="seq",
        train_infer_correction={"is_weight": weight, "filters": [rule, {"enabled": False}]},
    )
    config = loaded(migrate(path), tmp_path)
    assert isinstance(config, RlvrConfig)
    assert config.algorithm.loss[0].kind == "gspo"
    correction = config.algorithm.correction
    assert correction is not None
    assert correction.weight is not None
    assert (correction.weight.level, correction.weight.upper) == ("sequence", 1.5)
    [reject] = correction.reject
    assert (reject.level, reject.lower, reject.upper) == ("turn", 0.5, 2.0)


def test_environments_groups_and_tags(tmp_path: Path) -> None:
    config = of("agentic", tmp_path)
    assert isinstance(config, AgenticConfig)
    assert (config.data.prompts_per_step, config.data.samples_per_prompt) == (128, 8)
    assert config.data.max_episode_tokens == 8192
    lake, boxes = config.environments["Lake"], config.environments["Boxes"]
    assert (lake.env, lake.kwargs) == ("frozen_lake", {"size": 4, "slippery": True, "holes": 0.2})
    assert (boxes.env, boxes.kwargs) == ("sokoban", {"size": 6, "boxes": 2})
    assert lake.max_turns == 10
    assert [source.weight for source in config.data.sources] == [96, 32]
    assert config.validation.sets["Lake"].seeds == 512
    assert config.rollout.max_staleness == 1
    assert config.actor_train.strategy.kind == "deepspeed"
    assert config.actor_train.strategy.stage == 3
    assert config.actor_infer.devices_per_worker == 2
    assert config.reference is None


def test_environments_without_a_counterpart_need_a_server_of_the_user(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        "agentic",
        train_env_manager__tags=["Shop"],
        val_env_manager__tags=["Shop"],
        custom_envs={"Shop": "${custom_env.Shop}"},
    )
    made = migrate(path)
    config = loaded(made, tmp_path)
    assert isinstance(config, AgenticConfig)
    assert config.environments["Shop"].env == "http://127.0.0.1:8001"
    assert any("webshop has no counterpart" in line for line in made.todo)


def test_rewards_without_a_counterpart_need_a_server_of_the_user(tmp_path: Path) -> None:
    path = changed(tmp_path, "rlvr", rewards__math_rule__worker_cls="my.rewards.VideoRewardWorker")
    made = migrate(path)
    config = loaded(made, tmp_path)
    assert isinstance(config, RlvrConfig)
    assert config.rewards["math_rule"].remote is not None
    assert any(line.startswith("rewards.math_rule") for line in made.todo)


def test_pairs(tmp_path: Path) -> None:
    config = of("dpo", tmp_path)
    assert isinstance(config, DpoConfig)
    assert config.loss.model_dump(exclude_defaults=True) == {"beta": 0.2, "label_smoothing": 0.1}
    [source] = config.data.sources
    assert source.columns.model_dump(exclude_defaults=True) == {
        "prompt": "question",
        "chosen": "better",
        "rejected": "worse",
    }
    assert config.data.rows_per_step == 2 * 4 * 8
    assert config.epochs == 2
    assert config.model.lora is not None
    assert config.reference is None
    assert config.actor_train.strategy.model_dump()["replicas"] == 2


def test_texts(tmp_path: Path) -> None:
    made = migrate(FILES / "sft.yaml")
    config = loaded(made, tmp_path)
    assert isinstance(config, SftConfig)
    # 8 devices, tensor parallel 2 and context parallel 2: two data-parallel ranks there.
    assert config.data.rows_per_step == 1 * 8 * 2
    assert config.data.shuffle is False
    assert config.actor_train.strategy.model_dump()["cp"] == 2
    assert "query_key (line 9)" in made.text


def test_distillation(tmp_path: Path) -> None:
    config = of("distill", tmp_path)
    assert isinstance(config, DistillationConfig)
    assert config.loss.model_dump(exclude_defaults=True) == {
        "coef": 0.65,
        "sft_coef": 0.35,
        "student_temperature": 2.0,
        "teacher_temperature": 2.0,
        "divergence": {"alpha": 0.2},
    }
    assert config.loss.divergence.kind == "skewed_reverse"
    assert config.actor_train.strategy.kind == "megatron"
    assert config.teachers["teacher"].strategy.kind == "megatron"
    assert config.epochs == 3
    assert config.max_steps == 300


def test_on_policy_distillation(tmp_path: Path) -> None:
    config = of("on_policy_distill", tmp_path)
    assert isinstance(config, RlvrConfig)
    assert config.algorithm.advantage.kind == "distill"
    assert config.algorithm.advantage.model_dump(exclude_defaults=True) == {"coef": 0.5}
    assert {name: role.tags for name, role in config.teachers.items()} == {
        "math": ("math",),
        "code": ("code",),
    }


def test_verl(tmp_path: Path) -> None:
    config = of("verl", tmp_path)
    assert isinstance(config, RlvrConfig)
    assert config.cluster.nodes == 2
    assert config.actor_train.samples_per_update == 64 * 8  # verl counts prompts
    assert config.algorithm.advantage.model_dump()["std"] == "none"
    ppo, kl = config.algorithm.loss
    clips = ppo.model_dump()
    assert (clips["clip_low"], clips["clip_high"], clips["dual_clip"]) == (0.2, 0.28, 3.0)
    assert kl.model_dump()["coef"] == 0.002
    assert config.validation.samples_per_prompt == 4
    assert config.rollout.filters[0].kind == "equal_rewards"


def test_validation_of_verl_is_greedy_unless_a_temperature_is_told(tmp_path: Path) -> None:
    key = "actor_rollout_ref__rollout__val_kwargs"
    for told, temperature, samples in [
        (None, 0.0, 1),
        ({"n": 4}, 0.0, 1),
        ({"do_sample": True, "n": 4}, 0.0, 1),
        ({"temperature": 0.6, "do_sample": False}, 0.0, 1),
        ({"temperature": 0.6, "n": 4}, 0.6, 4),
    ]:
        made = migrate(changed(tmp_path, "verl", **{key: told}))
        config = loaded(made, tmp_path)
        assert isinstance(config, RlvrConfig)
        assert config.validation_sampling.temperature == temperature, told
        assert config.validation.samples_per_prompt == samples, told
        assert config.sampling.temperature == 1.0


def test_a_key_of_a_role_that_is_there_is_not_told_to_have_none(tmp_path: Path) -> None:
    ref = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    keys = {"actor_rollout_ref__actor__use_kl_loss": False, "critic__odd": 3}
    gae = {"algorithm__adv_estimator": "gae", "critic__odd": 3}

    def reason(made: Migration, key: str) -> str:
        (line,) = (line for line in made.text.splitlines() if key in line)
        return line

    assert "the role `reference` has no" in reason(migrate(FILES / "verl.yaml"), ref)
    without = migrate(changed(tmp_path, "verl", **keys))
    assert "there is no such role" in reason(without, ref)
    assert "only the advantage gae has a critic" in reason(without, "critic.odd")
    with_one = migrate(changed(tmp_path, "verl", **gae))
    assert "the role `critic` has no" in reason(with_one, "critic.odd")


def test_algorithms_of_verl(tmp_path: Path) -> None:
    keys = {"actor_rollout_ref__actor__use_kl_loss": False}
    for name, kind in {"gpg": "gpg", "optimal_token_baseline": "otb"}.items():
        path = changed(tmp_path, "verl", algorithm__adv_estimator=name, **keys)
        config = loaded(migrate(path), tmp_path)
        assert isinstance(config, RlvrConfig)
        assert config.algorithm.advantage.kind == kind
    mode = "actor_rollout_ref__actor__policy_loss__loss_mode"
    for name in ("tv", "kl"):
        made = migrate(changed(tmp_path, "verl", **{mode: f"dppo_{name}"}, **keys))
        config = loaded(made, tmp_path)
        assert isinstance(config, RlvrConfig)
        (term,) = config.algorithm.loss
        assert term.model_dump(exclude={"coef", "end_coef", "upper"}) == {
            "kind": "dppo",
            "divergence": name,
            "threshold": 0.28,
        }
        assert any("clip_ratio_low = 0.2 is lost" in line for line in made.todo)


def test_nemo_rl(tmp_path: Path) -> None:
    config = of("nemo_rl", tmp_path)
    assert isinstance(config, RlvrConfig)
    assert (config.data.prompts_per_step, config.data.samples_per_prompt) == (32, 16)
    assert config.actor_train.samples_per_update == 512
    assert config.algorithm.advantage.model_dump()["baseline"] == "leave_one_out"
    assert config.actor_train.packing is True
    assert config.sampling.stop_token_ids == (151643,)
    assert config.rewards["math"].fn == "math"


def test_a_reward_model_of_nemo_rl_on_megatron_stays_there(tmp_path: Path) -> None:
    tree = yaml.safe_load((FILES / "nemo_rl.yaml").read_text())
    megatron = {"enabled": True, "tensor_model_parallel_size": 2}
    batches = {"train_global_batch_size": 32, "train_micro_batch_size": 1}
    pairs = {
        "rm": {"max_num_epochs": 1, "max_num_steps": 10},
        "policy": {"model_name": "m", "megatron_cfg": megatron, **batches},
        "data": {"train": {"data_path": "pairs.jsonl"}},
        "cluster": tree["cluster"],
    }
    path = tmp_path / "pairs.yaml"
    path.write_text(yaml.safe_dump(pairs))
    config = loaded(migrate(path), tmp_path)
    assert isinstance(config, RewardModelConfig)
    assert config.actor_train.strategy.kind == "megatron"
    assert config.actor_train.strategy.tp == 2


ROLLS_SIZES = "sft_train__strategy_args__strategy_config"
VERLS_ACTOR = "actor_rollout_ref__actor"
NEMOS = "policy__megatron_cfg"


@pytest.mark.parametrize(
    ("file", "keys", "packs", "overlaps"),
    [
        ("sft", {}, True, False),  # cp is 2
        ("sft", {f"{ROLLS_SIZES}__context_parallel_size": 1}, True, False),
        ("sft", {f"{ROLLS_SIZES}__overlap_grad_reduce": True}, True, True),
        ("nemo_rl", {f"{NEMOS}__enabled": True}, True, False),
        ("nemo_rl", {NEMOS: {"enabled": True, "context_parallel_size": 2}}, True, False),
        (
            "nemo_rl",
            {
                f"{NEMOS}__enabled": True,
                f"{NEMOS}__distributed_data_parallel_config__overlap_grad_reduce": True,
            },
            True,
            True,
        ),
        (
            "verl",
            {
                f"{VERLS_ACTOR}__strategy": "megatron",
                f"{VERLS_ACTOR}__megatron__override_ddp_config__overlap_grad_reduce": True,
            },
            False,
            True,
        ),
    ],
)
def test_megatron_packs_rows_and_overlaps_reductions_as_before(
    tmp_path: Path, file: str, keys: dict[str, Any], packs: bool, overlaps: bool
) -> None:
    role = loaded(migrate(changed(tmp_path, file, **keys)), tmp_path).trained[Role.ACTOR_TRAIN]
    assert isinstance(role.strategy, MegatronConfig)
    assert (role.packing, role.strategy.overlap_grad_reduce) == (packs, overlaps)


@pytest.mark.parametrize("gathers", [True, False])
def test_an_overlapped_gather_is_kept_where_it_has_what_it_needs(
    tmp_path: Path, gathers: bool
) -> None:
    both = ("overlap_param_gather", "overlap_grad_reduce")
    keys = {f"{ROLLS_SIZES}__{key}": True for key in both}
    keys[f"{ROLLS_SIZES}__use_distributed_optimizer"] = gathers
    made = migrate(changed(tmp_path, "sft", **keys))
    strategy = loaded(made, tmp_path).trained[Role.ACTOR_TRAIN].strategy
    assert isinstance(strategy, MegatronConfig)
    assert strategy.overlap_param_gather == gathers


@pytest.mark.parametrize("recomputes", [True, False])
def test_activations_in_host_memory_are_kept_where_they_are_recomputed(
    tmp_path: Path, recomputes: bool
) -> None:
    model = "actor_rollout_ref__model__enable"
    keys = {f"{model}_activation_offload": True, f"{model}_gradient_checkpointing": recomputes}
    made = migrate(changed(tmp_path, "verl", **keys))
    strategy = loaded(made, tmp_path).trained[Role.ACTOR_TRAIN].strategy
    assert isinstance(strategy, Fsdp2Config)
    assert strategy.offload_activations == recomputes


@pytest.mark.parametrize(
    ("file", "key", "name", "kind", "said"),
    [
        ("nemo_rl", "policy__optimizer__name", "torch.optim.AdamW", "adamw", None),
        ("nemo_rl", "policy__optimizer__name", "torch.optim.Muon", "muon", "optimizer.lr: look"),
        ("nemo_rl", "policy__optimizer__name", "torch.optim.SGD", "sgd", None),
        ("nemo_rl", "policy__optimizer__name", "my.Lion", "adamw", "adamw in place of my.Lion"),
        ("verl", "actor_rollout_ref__actor__optim__optimizer", "AdamW", "adamw", None),
        ("verl", "actor_rollout_ref__actor__optim__optimizer", "Adafactor", "adafactor", "look at"),
        ("rlvr", "actor_train__training_args__optim", "adamw_torch", "adamw", None),
        (
            "rlvr",
            "actor_train__training_args__optim",
            "muon",
            "adamw",
            "needs actor_train.strategy",
        ),
    ],
)
def test_names_of_optimizers(
    file: str, key: str, name: str, kind: str, said: str | None, tmp_path: Path
) -> None:
    made = migrate(changed(tmp_path, file, **{key: name}))
    optimizer = loaded(made, tmp_path).trained[Role.ACTOR_TRAIN].optimizer
    assert optimizer.kind == kind
    if isinstance(optimizer, MuonConfig):
        assert optimizer.others.betas == (0.9, 0.999)
        assert optimizer.weight_decay == 0.01
    assert bool(said) == any("optimizer" in line for line in made.todo)
    assert said is None or any(said in line for line in made.todo)


def test_files_of_defaults_are_read_and_missing_ones_named() -> None:
    made = migrate(FILES / "agentic.yaml")
    assert any("../config/deepspeed_zero" in line for line in made.todo)
    assert not any("envs" in line for line in made.todo)
    assert "custom_env.Shop" in made.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n", "is no run file of ROLL"),
        ("- 1\n", "must be a mapping"),
        ("actor_train: [\n", "not valid YAML"),
        ("pools: {all: '0'}\nmodel: {path: m}\n", "run file of this framework already"),
        ("pretrain: Wan2.2-diffusion\nactor_train: {}\n", "diffusion"),
    ],
)
def test_a_file_that_cannot_be_translated_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        migrate(path)


def test_a_value_that_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "actor_train: {device_mapping: __import__('os').system('true')}\n"
        "rollout_batch_size: many\n"
        "output_dir: ${oc.env:NOWHERE}\n"
        "rewards: {math_rule: {world_size: 1}}\n"
    )
    text = migrate(path).text
    assert "actor_train.device_mapping (line 1): `__import__" in text
    assert "rollout_batch_size (line 2): expected a number, found 'many'" in text
    assert "output_dir (line 3): ${oc.env:NOWHERE} has no value here" in text


def test_the_command_writes_the_file_once(tmp_path: Path) -> None:
    out = tmp_path / "ours.yaml"
    command = ["migrate", str(FILES / "rlvr.yaml"), "-o", str(out)]
    done = CliRunner().invoke(app, [*command, "--model", "my/model", "--data", "my/data"])
    assert done.exit_code == 0, done.output
    assert "not valid yet" not in done.output
    config = load_config(out).config
    assert {model.path for model in config.models.values()} == {"my/model"}
    assert {source.path for source in config.sources} == {"my/data"}
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    printed = CliRunner().invoke(app, command[:2])
    assert printed.output.startswith("# Made by `roll migrate rlvr.yaml`")


def test_a_number_that_is_written_as_text_is_a_number(tmp_path: Path) -> None:
    path = changed(tmp_path, "rlvr", actor_train__training_args__learning_rate="0.000003")
    assert loaded(migrate(path), tmp_path).trained[Role.ACTOR_TRAIN].optimizer.lr == 3e-6
