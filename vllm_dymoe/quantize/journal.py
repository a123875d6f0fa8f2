"""Which layers of a store are packed, so that a run that takes hours can be ended and gone on with."""

import json
import os
from pathlib import Path
from typing import Any

NAME = "packed-layers.jsonl"


class Journal:
    """A file beside the shards: what is being packed, then a line for each layer that is complete and synced.

    Args:
        purpose: all that decides what they will hold, in one line; a journal of anything else is begun anew.
    """

    def __init__(self, folder: Path, purpose: str) -> None:
        self._path = folder / NAME
        self.layers: dict[int, Any] = {}
        if is_journal_of(folder, purpose):
            for line in self._path.read_text().splitlines()[1:]:
                try:
                    layer, state = json.loads(line)
                except ValueError:
                    break  # the line that was being written
                self.layers[layer] = state
        lines = [purpose, *(json.dumps(entry) for entry in self.layers.items())]
        self._path.write_text("".join(f"{line}\n" for line in lines))

    def add(self, layer: int, state: Any) -> None:
        """Note that a layer (by position) is complete, and what has to be known of it later, as JSON data."""
        with self._path.open("a") as file:
            file.write(json.dumps((layer, state)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The store is complete."""
        self._path.unlink()


def is_journal_of(folder: Path, purpose: str) -> bool:
    """Whether a folder has layers that were packed for the same purpose."""
    try:
        with (folder / NAME).open() as file:
            return file.readline() == f"{purpose}\n"
    except OSError:
        return False
