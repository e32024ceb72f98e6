"""Run distillation: the same as `roll run DIR/NAME.yaml [key=value ...]`.

The student learns from given texts; or, with `pipeline: rlvr` and a `distill` loss term, from its
own samples.

python examples/start_distill_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

from roll.cli import start_pipeline

if __name__ == "__main__":
    start_pipeline("distill", "rlvr")()
