"""The program that names what is fetched ahead against its plain twin, and the copies."""

from functools import partial

import pytest
import torch

from tests.kernels.sections import DEVICE
from tests.kernels.twins import Twins
from tests.support.decode_steps import EXPERTS, LAYERS, TOKENS, TOP_K, make_table, random_step, rows
from tests.support.no_host import HostInStepError, NoHost
from vllm_dymoe.kernels.triton.ahead import fetch_ahead, name_ahead
from vllm_dymoe.predict import Gate
from vllm_dymoe.predict.folded import FoldedMLP
from vllm_dymoe.predict.next_gate import GatesOnDevice
from vllm_dymoe.predict.trained import NetworkOnDevice
from vllm_dymoe.residency.decode_ahead import MOST_AHEAD, Copies
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.residency.table import Counter, Table
from vllm_dymoe.runtime.ahead import Ahead, Branch


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(512, 22, 3), (128, 8, 16)])
def test_sizes_of_models(experts, top_k, tokens):
    shares = {LOW: [0] * LAYERS, HIGH: [experts // 4] * LAYERS}
    sizes = {"experts": experts, "top_k": top_k, "tokens": tokens}
    twins = Twins(shares, staging=30, most_ahead=22, **sizes)
    for seed in range(3):
        ids, scores = random_step(seed, tokens, top_k, experts)
        copies = twins.foresee(1, ids.int(), scores)
        assert copies.spans[:, 2].count_nonzero() == MOST_AHEAD
        twins.step(1, ids, scores)
    assert twins.plain.counters[1, Counter.AHEAD_USED] > 0


def test_copies_are_of_so_many_bytes_and_of_no_more():
    """None, a part of one turn of a program, many turns of all of them."""
    lengths = [0, 16, 4096, 16 * 8192 * 2 + 8192 + 48]
    sources = [torch.randint(0, 255, (max(count, 16),), dtype=torch.uint8, device=DEVICE) for count in lengths]
    slots = [torch.full((len(source) + 16,), 0xEE, dtype=torch.uint8, device=DEVICE) for source in sources]
    copies = Copies.allocate(1, 1, EXPERTS, DEVICE)
    for number, (source, slot, count) in enumerate(zip(sources, slots, lengths, strict=True)):
        copies.spans[number] = torch.tensor([source.data_ptr(), slot.data_ptr(), count])
    fetch_ahead(vars(copies))
    for source, slot, count in zip(sources, slots, lengths, strict=True):
        assert torch.equal(slot[:count], source[:count])
        assert (slot[count:] == 0xEE).all()


def test_what_the_program_does_not_hold_is_refused():
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, experts=600)
    ids, scores = random_step(0, 1)
    with pytest.raises(ValueError, match="600 experts, but a device decides for at most 512"):
        name_ahead(vars(table), 0, ids, scores, rows(1), vars(Copies.allocate(1, 3, 600, "cpu")))
    table, copies = make_table({LOW: [0, 0], HIGH: [0, 0]}), Copies.allocate(1, 3, EXPERTS, "cpu")
    ids, scores = random_step(0, TOKENS)
    with pytest.raises(ValueError, match="6 tokens with 3 guesses need scratch of 114, but 99 are held"):
        name_ahead(vars(table), 0, ids, scores, rows(1), vars(copies))


class Traced:
    """A kernel whose launches are only noted."""

    def __init__(self):
        self.launches = []

    def _start(self, kernel, grid, tensors, constants, options):
        assert all(isinstance(value, int) or value.device.type == "meta" for value in tensors)
        self.launches.append((kernel.__name__, grid))

    def name_ahead(self, table, layer, ids, scores, rows, copies):
        name_ahead(vars(table), layer, ids, scores, rows, vars(copies), start=self._start)

    def fetch_ahead(self, copies):
        fetch_ahead(vars(copies), start=self._start)


def meta(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")


def gates(**options):
    return [Gate(partial(torch.nn.functional.linear, weight=meta(EXPERTS, 32)), **options) for _ in range(3)]


PREDICTORS = {
    "gate": lambda: GatesOnDevice(gates(), TOP_K, torch.device("meta")),
    "gate of groups, with a correction, on one rank of two": lambda: GatesOnDevice(
        gates(scoring="sigmoid", correction=meta(EXPERTS), groups=4, top_groups=2, local=range(-6, 6)), TOP_K, "meta"
    ),
    "network": lambda: NetworkOnDevice(
        FoldedMLP({
            "tables": meta(2, 2 * EXPERTS, 8), "gates": meta(2, 32, 8), "matrix.0": meta(2, 8, EXPERTS),
            "bias.0": meta(2, EXPERTS), "popularity": meta(3, EXPERTS),
        }),
        TOP_K,
    ),
}  # fmt: skip


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_a_branch_is_two_launches_of_ours_without_a_host(predictor):
    table = Table.allocate(3, EXPERTS, rows=4, top_k=TOP_K, depth=1, device="meta")
    kernel = Traced()
    ahead = Ahead(table, kernel, PREDICTORS[predictor](), Branch(), rows=4)
    with NoHost():
        for layer in range(3):
            ahead.name(layer, meta(4, 32), meta(4, TOP_K, dtype=torch.int32), meta(1, dtype=torch.int32))
            ahead.fetch()
        ahead.join()
    assert kernel.launches == 2 * [("name_ahead_kernel", (1,)), ("fetch_ahead_kernel", (16, MOST_AHEAD))]


def test_a_planted_look_at_what_was_named_is_found():
    class Looks(GatesOnDevice):
        def foresee(self, layer, x, ids):
            experts, scores = super().foresee(layer, x, ids)
            return experts[scores > 0], scores

    table = Table.allocate(3, EXPERTS, rows=4, top_k=TOP_K, depth=1, device="meta")
    ahead = Ahead(table, Traced(), Looks(gates(), TOP_K, "meta"), Branch(), rows=4)
    with NoHost(), pytest.raises(HostInStepError, match="waits for the device"):
        ahead.name(0, meta(4, 32), meta(4, TOP_K, dtype=torch.int32), meta(1, dtype=torch.int32))
