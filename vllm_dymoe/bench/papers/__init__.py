"""The papers' tables and figures, each with its rows, its numbers and ours."""

from collections.abc import Callable, Iterator

from vllm_dymoe.bench.papers import duoserve, dymoe, dynaexq, firm
from vllm_dymoe.bench.papers.tables import PaperTable

PAPERS: dict[str, Callable[[], Iterator[PaperTable]]] = {
    "dymoe": dymoe.tables,
    "duoserve": duoserve.tables,
    "firm": firm.tables,
    "dynaexq": dynaexq.tables,
}  # by name
