"""RLVR runs of ROLL, with on-policy distillation."""

from __future__ import annotations

from roll.migrate.from_roll.data import put_prompts, put_validation
from roll.migrate.from_roll.engines import put_engine, put_sampling
from roll.migrate.from_roll.policy import put_algorithm
from roll.migrate.from_roll.rewards import put_rewards
from roll.migrate.from_roll.roles import (
    devices,
    put_model,
    put_pool,
    put_scorer,
    put_trainer,
)
from roll.migrate.job import Job, needs_reference
from roll.migrate.stand_ins import put_stand_in


def translate(job: Job) -> None:
    """Translate the file of an RLVR run."""
    train, infer = actors(job)
    if job.count("max_steps", "max_steps") is None:
        job.put("max_steps", 500)
    if job.count("rollout_batch_size", "data.prompts_per_step", note="prompts") is None:
        job.put("data.prompts_per_step", 128)
    put_group(job, infer)
    prompt, response = lengths(job, infer)
    job.put("data.max_prompt_tokens", prompt, "prompt_length")
    args = f"{infer}.generating_args"
    longest = "response_length" if job.keys.has("response_length") else "sequence_length"
    put_sampling(job, args, "sampling", longest, response)
    tags = put_rewards(job)
    policy(job, train, infer, prompt + response, tags)
    if not tags and job.draft.get("algorithm.advantage.kind") != "distill":
        put_stand_in(job, "reward", "default")
    put_prompts(job, tags, train)
    if not put_validation(job, tags):
        job.why("validation", "there is no validation set")
    elif not job.keys.names("rewards"):
        job.draft.drop("validation")
        job.ask("validation: without rewards nothing scores the sets, which are left out")
    else:
        _put_validation_sampling(job, response)


def actors(job: Job) -> tuple[str, str]:
    """Return the keys of the trained role and of the engines; those of on-policy distillation have
    names of their own."""
    if job.keys.has("student_train"):
        return "student_train", "student_infer"
    return "actor_train", "actor_infer"


def put_group(job: Job, infer: str) -> None:
    """Write the samples per prompt, and how they are collected."""
    key, own = "num_return_sequences_in_group", f"{infer}.generating_args.num_return_sequences"
    key = key if job.keys.whole(key) else own
    if job.count(key, "data.samples_per_prompt", note="samples of each prompt") is None:
        job.put("data.samples_per_prompt", 1)
    if job.keys.whole(own) == job.draft.get("data.samples_per_prompt") and job.keys.has(own):
        job.put("data.samples_per_prompt", job.keys.whole(own), key, *({own} - {key}))
    job.why(own, "num_return_sequences_in_group says it")


def put_rollout(job: Job) -> None:
    """Write how far generation runs ahead, and how requests are sent."""
    ratio = job.keys.number("async_generation_ratio")
    if ratio is not None and ratio >= 0:
        steps = int(-(-ratio // 1))
        note = f"{ratio:g} rounded up to whole steps" if steps != ratio else ""
        job.put("rollout.max_staleness", steps, "async_generation_ratio", note=note)
    expand = job.keys.flag("is_num_return_sequences_expand")
    if expand is not None:
        value = "separate" if expand else "together"
        job.put("rollout.siblings", value, "is_num_return_sequences_expand")
    extra = "max_additional_running_prompts"
    if job.keys.flag("is_use_additional_prompts"):
        told = job.keys.whole(extra)
        prompts = 16 if told is None else max(told, 0)
        job.put("rollout.extra_prompts", prompts, extra, "is_use_additional_prompts")
    for key in (extra, "is_use_additional_prompts"):
        job.why(key, "off: no prompts beyond those of the step")
    router = job.keys.text("router_args.router_name")
    if router is not None:
        job.put("rollout.routing", "sticky", "router_args.router_name")
    job.count("model_update_buffer_size_mb", "weight_sync.bucket_mb")


def lengths(job: Job, infer: str) -> tuple[int, int]:
    """Return the longest prompt and the longest response, in tokens."""
    prompt = job.keys.whole("prompt_length") or 1024
    whole = job.keys.whole("sequence_length")
    response = job.keys.whole(f"{infer}.generating_args.max_new_tokens")
    response = response or job.keys.whole("response_length")
    if response is None and whole is not None:
        response = whole - prompt
    if whole is not None and response is not None and whole == prompt + response:
        job.why("sequence_length", "prompt_length + response_length")
    return max(prompt, 1), max(response or 1024, 1)


def policy(job: Job, train: str, infer: str, row: int, tags: list[str]) -> None:
    """Write the roles of a policy that learns from its samples, and the algorithm.

    Args:
        train, infer: keys of the trained role and of the engines.
        row: largest number of tokens of a sample, its prompt included.
        tags: tags of the samples.
    """
    put_model(job, train, "model", "pretrain", "student_pretrain")
    for role in (infer, "reference"):
        same = job.keys.text(f"{role}.model_args.model_name_or_path")
        if same is not None and same == job.draft.get("model.path"):
            job.keys.use(f"{role}.model_args.model_name_or_path")
    put_rollout(job)
    put_algorithm(job, row, agentic=job.draft.get("pipeline") == "agentic")
    put_trainer(job, train, "actor_train", row)
    job.count("ppo_epochs", "actor_train.epochs")
    put_pool(job, infer, "actor_infer", "infer", train)
    found = devices(job, infer) or devices(job, train) or (0,)
    put_engine(job, infer, "actor_infer", found, row)
    _put_reference(job, train, row)
    _put_critic(job, train, row)
    _put_teachers(job, train, row, tags)


def _put_reference(job: Job, train: str, row: int) -> None:
    """Write the reference, if something compares with it and no adapter's base is one."""
    if not needs_reference(job):
        job.why("reference", "nothing in the algorithm compares with it; there is no such role")
    elif job.draft.get("model.lora") is not None:
        job.why("reference", "the base of the adapter (model.lora) is the reference")
    else:
        put_scorer(job, "reference", "reference", "reference", row, train)
        why = "the reference is the model that training starts from"
        job.why("reference.model_args", why)


def _put_critic(job: Job, train: str, row: int) -> None:
    """Write the critic, if the advantage needs one."""
    if job.draft.get("algorithm.advantage.kind") != "gae":
        for key in ("critic", "critic_warmup", "value_clip"):
            job.why(key, "only the advantage gae has a critic")
        return
    put_trainer(job, "critic" if job.keys.has("critic") else train, "critic", row, train)
    role_model = "critic.model_args.model_name_or_path"
    if job.keys.has("reward_pretrain") or job.keys.has(role_model):
        put_model(job, "critic", "critic.model", "reward_pretrain")
    job.count("ppo_epochs", "critic.epochs")
    if job.keys.whole("critic_warmup"):
        steps = job.keys.whole("critic_warmup") or 0
        if steps < job.draft.get("max_steps"):
            job.count("critic_warmup", "critic.warmup_steps")
    job.why("critic_warmup", "0, or as long as the run")
    clip = job.keys.number("value_clip")
    if clip is not None and clip > 0:
        job.put("critic.loss.clip", float(clip), "value_clip")
    else:
        job.put("critic.loss.clip", None, "value_clip")


def _put_teachers(job: Job, train: str, row: int, tags: list[str]) -> None:
    """Write the teachers of on-policy distillation, and the advantage that follows them."""
    pure, mixed = job.keys.flag("is_pure_opd"), job.keys.flag("use_opd")
    wanted = pure or mixed or job.keys.has("student_train")
    if not wanted or not job.keys.names("teacher"):
        for key in ("teacher", "is_pure_opd", "use_opd", "opd_kl_coef"):
            job.why(key, "on-policy distillation is off, or there is no teacher")
        return
    single = any(job.keys.has(f"teacher.{part}") for part in ("strategy_args", "device_mapping"))
    roles = ["teacher"] if single else [f"teacher.{name}" for name in job.keys.names("teacher")]
    coefs: list[tuple[str, float]] = []
    taken: set[str] = set()
    for role in roles:
        name = "teacher" if single else role.rpartition(".")[2]
        target, key = f"teachers.{name}", f"{role}.tag_included"
        put_scorer(job, role, target, "teacher", row, train)
        put_model(job, role, f"{target}.model", "teacher_pretrain")
        for dropped in ("lora", "freeze"):
            job.draft.drop(f"{target}.model.{dropped}")
        own = [tag for tag in job.keys.texts(key) or tags or ["default"] if tag not in taken]
        taken.update(own)
        if own:
            job.put(f"{target}.tags", own, key)
        else:
            job.draft.drop(target)
            job.ask(f"{target}: other teachers have all of its tags; give it some of its own")
        for coef in (f"{role}.opd_kl_coef", "opd_kl_coef"):
            value = job.keys.number(coef)
            if value is not None and value > 0:
                coefs.append((coef, float(value)))
                break
    value = coefs[0][1] if coefs else 1.0
    if any(each != value for _, each in coefs):
        job.ask("algorithm.advantage.coef: teachers have coefficients of their own; one is used")
    advantage = {"kind": "distill", "coef": value, "mix": 0.0 if pure or not mixed else 1.0}
    if job.draft.get("data.samples_per_prompt") < 2 and advantage["mix"]:
        advantage["mix"] = 0.0
        job.ask("algorithm.advantage.mix: the reward's part compares samples of a prompt; one")
    keys = ["is_pure_opd", "use_opd", "pure_opd_pipeline_type", *(coef for coef, _ in coefs)]
    job.put("algorithm.advantage", advantage, *keys)
    job.draft.drop("critic")
    if not job.keys.names("rewards"):
        job.draft.drop("algorithm.reward_shaping")
        job.draft.drop("algorithm.sample_weights")
        job.draft.put(
            "algorithm.masks",
            [m for m in job.draft.get("algorithm.masks", []) if m["kind"] == "overlong"],
        )


def _put_validation_sampling(job: Job, response: int) -> None:
    """Write the sampling of validation, and the samples per prompt."""
    args = "validation.generating_args"
    if not job.keys.has(args):
        return
    own = job.keys.whole(f"{args}.max_new_tokens") or job.keys.whole("val_response_length")
    put_sampling(job, args, "validation.sampling", "val_response_length", own or response)
    greedy = job.draft.get("validation.sampling.temperature") == 0
    key = f"{args}.num_return_sequences"
    if greedy and (job.keys.whole(key) or 1) > 1:
        job.why(key, "greedy sampling gives the same sample each time")
    else:
        job.count(key, "validation.samples_per_prompt")
