"""What a worker does with a step in which an expert could not be fetched.

vLLM takes an exception in a model's forward for the end of the engine, and with
several ranks the others would wait in their next all-reduce for ever. So the
layer that failed returns zeros and notes a sentence here, the layers behind it
do no work, and the sentence leaves the worker with the step's output; the
scheduler then ends the requests of that step (``failed_requests``).

The output of one rank only is collected. Another rank leaves its sentence at the
process group's key-value store *before* it takes part in the step's next
collective, so it is there when the output rank has the step's tokens: one
look-up for each step, and none with a single rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_dymoe.vllm_adapter.step import RunningStep


@dataclass
class FailedStep(ModelRunnerOutput):
    """The output of a step that must not be used.

    Attributes:
        failure: one sentence for whoever sent the step's requests.
    """

    failure: str = ""

    @classmethod
    def of(cls, output: ModelRunnerOutput, failure: str) -> "FailedStep":
        """The same output, declared failed; ``output`` may be shared by many steps and stays as it is."""
        return cls(**{field.name: getattr(output, field.name) for field in fields(output)}, failure=failure)


class Board(Protocol):
    """Where ranks leave sentences for the output rank."""

    def write(self, step: int, sentence: str) -> None:
        """Leave a sentence; on return it can be read."""
        ...

    def take(self, step: int) -> str | None:
        """The sentence that a rank has left for a step."""
        ...


class StepFailures:
    """The failure of the running step, if any: the first sentence wins.

    Args:
        step: the running one.
        board: what the ranks share; None for a single rank.
        collects: whether this rank's output is the one that vLLM collects.

    Attributes:
        sentence: what went wrong in the running step.
        on_failure: called with the number of a step that failed on any rank, when its output is complete.
    """

    def __init__(self, step: RunningStep, board: Board | None = None, *, collects: bool = True) -> None:
        self.sentence: str | None = None
        self.on_failure: Callable[[int], None] = lambda step: None
        self._step = step
        self._board = board
        self._collects = collects

    @property
    def alone(self) -> bool:
        """Whether no other rank waits for this one."""
        return self._board is None

    def record(self, sentence: str) -> None:
        """Note that the running step has failed here."""
        if self.sentence is None:
            self.sentence = sentence
            if self._board is not None:
                self._board.write(self._step.number, sentence)

    def finish(self, output: Any) -> Any:
        """The step ends: declare its output failed if the step is.

        Args:
            output: a ModelRunnerOutput, an AsyncModelRunnerOutput, or None where this rank has none.
        """
        step, mine = self._step.number, self.sentence
        self.sentence = None
        self._step.end()
        if output is None or not self._collects or (mine is None and self._board is None):
            return output

        def checked(complete: ModelRunnerOutput) -> ModelRunnerOutput:
            theirs = self._board.take(step) if self._board is not None else None
            failure = mine or theirs
            if failure:
                self.on_failure(step)
            return FailedStep.of(complete, failure) if failure else complete

        # An output that is still being computed says nothing yet about the other ranks.
        return _Checked(output, checked) if isinstance(output, AsyncModelRunnerOutput) else checked(output)


class _Checked(AsyncModelRunnerOutput):
    """An asynchronous output that is checked when it is there."""

    def __init__(self, output: AsyncModelRunnerOutput, check: Callable[[ModelRunnerOutput], ModelRunnerOutput]) -> None:
        self._output = output
        self._check = check

    def get_output(self) -> ModelRunnerOutput:
        return self._check(self._output.get_output())


class ProcessGroupBoard:
    """A :class:`Board` in the key-value store that torch.distributed was initialised with.

    Args:
        store: a torch.distributed.Store that all ranks share.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def write(self, step: int, sentence: str) -> None:
        """Leave a sentence; writing alone does not wait for the server, looking does."""
        self._store.set(_key(step), sentence)
        self._store.check([_key(step)])

    def take(self, step: int) -> str | None:
        """Look, without waiting."""
        if not self._store.check([_key(step)]):
            return None
        sentence = self._store.get(_key(step)).decode()
        self._store.delete_key(_key(step))
        return str(sentence)


def make_step_failures(step: RunningStep) -> StepFailures:
    """For this worker, after vLLM has set up its process groups."""
    from torch.distributed import distributed_c10d
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group

    if get_world_group().world_size == 1:
        return StepFailures(step)
    collects = get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0
    return StepFailures(step, ProcessGroupBoard(distributed_c10d._get_default_store()), collects=collects)


def _key(step: int) -> str:
    return f"vllm_dymoe/failed_step/{step}"
