"""The running step of a rank: whether requests asked for it, which of its rows are their tokens, and its phase.

vLLM also runs the model for nobody: to profile, to compile, to capture graphs, and to warm kernels up, which its second
model runner does through ``Worker.execute_model`` with all that a request has. What executors ask for comes through the
worker's wrapper, and nothing else does. So a step begins there, and whatever runs outside of a step is warm-up.
"""

from typing import Any

from vllm_dymoe.experts.routing import Phase


class RunningStep:
    """What one rank computes at the moment.

    Attributes:
        number: of the last step that began; all ranks see the same steps, so they count alike.
        phase: of the step.
    """

    def __init__(self) -> None:
        self.number = 0
        self.phase = Phase.DECODE
        self._scheduled: Any = None

    @property
    def warming_up(self) -> bool:
        """Whether what runs now was made up by vLLM."""
        return self._scheduled is None

    @property
    def tokens(self) -> int:
        """Rows that requests asked for, which come first; 0 while vLLM warms up.

        Asked anew each time: drafts that a GPU's n-grams did not find are taken off after the step has begun.
        """
        return 0 if self._scheduled is None else int(self._scheduled.total_num_scheduled_tokens)

    def begin(self, scheduler_output: Any) -> None:
        """A step of at least one token begins.

        It is a prefill if any request computes more than one token that is not drafted.
        """
        drafted = scheduler_output.scheduled_spec_decode_tokens
        counts = scheduler_output.num_scheduled_tokens.items()
        prefill = any(count - len(drafted.get(request, ())) > 1 for request, count in counts)
        self.number += 1
        self._scheduled = scheduler_output
        self.phase = Phase.PREFILL if prefill else Phase.DECODE

    def end(self) -> None:
        """The step has computed everything."""
        self._scheduled = None

    def real(self, rows: int) -> int:
        """How many of a layer's rows are tokens; the others, behind them, fill up a captured graph's batch."""
        return rows if self.warming_up else min(rows, self.tokens)
