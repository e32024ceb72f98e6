"""Run an agentic pipeline: the same as `roll run DIR/NAME.yaml [key=value ...]`.

python examples/start_agentic_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

from roll.cli import start_pipeline

if __name__ == "__main__":
    start_pipeline("agentic")()
