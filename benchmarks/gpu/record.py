"""Findings of a part of `make gpu`, as lines of JSON.

They are kept even if the part hangs or dies.
"""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class PartEndedError(Exception):
    """A check has died, so its part ends.

    Later checks would prove nothing, because a CUDA error comes back from every later call.
    """


class Recorder:
    """Writes the findings of a part.

    Args:
        path: file to append to.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def _write(self, kind: str, **content: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **content}) + "\n")
        self._file.flush()

    @contextmanager
    def check(self, name: str) -> Iterator[list[str]]:
        """Open a check; the ``with`` block appends what is wrong, as sentences.

        Raises:
            PartEndedError: the block raised an exception, which is recorded as wrong.
        """
        self._write("begin", name=name)
        wrong: list[str] = []
        begin = time.perf_counter()
        try:
            yield wrong
        except Exception as error:
            traceback.print_exc()
            wrong.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            raise PartEndedError from error
        finally:
            self._write("check", name=name, wrong=wrong, seconds=round(time.perf_counter() - begin, 2))

    def speed(self, name: str, unit: str, measured: float, bound: float, share: float, remark: str = "") -> None:
        """Record a measurement, its bound, and the share of the bound that it reaches.

        The first two are in the same unit; the share is from 0 to 1. The bound is 0 if none is known.
        """
        self._write("speed", name=name, unit=unit, measured=measured, bound=bound, share=share, remark=remark)

    def say(self, sentence: str) -> None:
        """Record a remark for the report."""
        self._write("sentence", sentence=sentence)

    def keep(self, **facts: Any) -> None:
        """Record data for the JSON file."""
        self._write("facts", facts=facts)

    def end(self) -> None:
        """Mark the part as complete."""
        self._write("end")
        self._file.close()


@dataclass
class Found:
    """What is known about one part."""

    checks: list[dict[str, Any]] = field(default_factory=list)  # name, wrong (sentences) and seconds of each
    speeds: list[dict[str, Any]] = field(default_factory=list)  # as in Recorder.speed
    sentences: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    under_way: str | None = None  # the check that has begun and not ended
    complete: bool = False
    failure: str | None = None  # why the part is not complete, as a sentence
    seconds: float = 0.0

    def add(self, line: str) -> dict[str, Any]:
        """Add one line of a part's file, and return it."""
        entry: dict[str, Any] = json.loads(line)
        match entry:
            case {"kind": "begin", "name": name}:
                self.under_way = name
            case {"kind": "check", **check}:
                self.checks.append(check)
                self.under_way = None
            case {"kind": "speed", **speed}:
                self.speeds.append(speed)
            case {"kind": "sentence", "sentence": sentence}:
                self.sentences.append(sentence)
            case {"kind": "facts", "facts": facts}:
                self.facts |= facts
            case {"kind": "end"}:
                self.complete = True
        return entry

    @property
    def wrong(self) -> list[str]:
        """Return everything that is wrong, as sentences."""
        found = [f"{check['name']}: {sentence}" for check in self.checks for sentence in check["wrong"]]
        return found if self.failure is None else [*found, self.failure]
