"""Numbers of wrong answers mean nothing: which rows must have answered alike, and whether they have."""

from collections.abc import Iterable

from vllm_dymoe.bench.rows import Row
from vllm_dymoe.config import ConfigError


class OutputsDifferError(ConfigError):
    """Two rows of one fixed precision gave other tokens: a mistake of ours, or of the machine."""


def check_outputs(rows: Iterable[Row]) -> int:
    """Compare every answer of rows whose precision is fixed with that of the first of them.

    Returns:
        Answers that were compared.

    Raises:
        OutputsDifferError: one is not the same, token by token.
    """
    first: dict[str, Row] = {}
    compared = 0
    for row in rows:
        precision = row.get("fixed_precision")
        if precision is None:
            continue
        before = first.setdefault(precision, row)
        ours, theirs = row["measured"]["outputs"], before["measured"]["outputs"]
        different = [place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
        if different or len(ours) != len(theirs):
            raise OutputsDifferError(
                f'nothing is reported: "{row["label"]}" at {row["budget"]} and "{before["label"]}" at '
                f"{before['budget']} have the same precision and answer differently, beginning with request "
                f"{(different or [min(len(ours), len(theirs))])[0] + 1} of {len(theirs)} (batch {row['batch']}). "
                "Please report this with the folder of rows."
            )
        compared += 0 if before is row else len(ours)
    return compared
