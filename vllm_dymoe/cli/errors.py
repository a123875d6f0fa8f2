"""What a user did wrong is one sentence on stderr and exit code 1, never a traceback."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")


def one_sentence_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors that are addressed to users into their message; any other stays a traceback, as our mistake."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, _user_errors()):
                raise
            typer.echo(f"vllm-dymoe: {str(error).removeprefix('vllm-dymoe: ')}", err=True)
            raise typer.Exit(1) from None

    return wrapped


def _user_errors() -> tuple[type[Exception], ...]:
    # Here and not above: these modules import torch, which --help must not wait for.
    from vllm_dymoe.config import ConfigError
    from vllm_dymoe.observe.trace import TraceError
    from vllm_dymoe.predict.checkpoint import PredictorError
    from vllm_dymoe.quantize.recording import CalibrationError
    from vllm_dymoe.quantize.tensors import CheckpointError
    from vllm_dymoe.residency.budget import BudgetError
    from vllm_dymoe.store import StoreError
    from vllm_dymoe.training import TrainingError

    return (
        BudgetError,
        CalibrationError,
        CheckpointError,
        ConfigError,
        PredictorError,
        StoreError,
        TraceError,
        TrainingError,
    )
