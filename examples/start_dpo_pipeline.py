"""Run preference optimization: the same as `roll run DIR/NAME.yaml [key=value ...]`.

The setting `loss` selects DPO, KTO or another preference loss.

python examples/start_dpo_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

from roll.cli import start_pipeline

if __name__ == "__main__":
    start_pipeline("dpo")()
