"""The command ``vllm-dymoe``.

Its help needs neither torch nor vLLM; each command imports what it needs when it runs.
"""

from vllm_dymoe.cli.app import app


def main() -> None:
    app()


__all__ = ["app", "main"]
