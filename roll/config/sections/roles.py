"""The roles a cluster of workers can play."""

from enum import StrEnum


class Role(StrEnum):
    ACTOR_TRAIN = "actor_train"
    ACTOR_INFER = "actor_infer"
    REFERENCE = "reference"
    CRITIC = "critic"
    PROCESS_REWARD = "process_reward"
    TEACHER = "teacher"
    REWARD = "reward"
    JUDGE = "judge"
    OPPONENT = "opponent"
    SEARCH = "search"
    ENVIRONMENT = "environment"
    PICTURES = "pictures"
    SAMPLES = "samples"
