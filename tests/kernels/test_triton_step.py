"""A whole decode step in three launches: its bits are those of everything resident, whatever is fetched."""

import pytest
import torch

from benchmarks.gpu.experts import table_of_blobs
from tests.kernels.sections import DEVICE, TOLERANCE, Experts, poisoned, random_x, relative_error, work_list
from tests.support.decode_steps import rows
from tests.support.no_host import HostInStepError, NoHost
from vllm_dymoe.kernels import Activation, Curve, combine
from vllm_dymoe.kernels.triton import DecodeTile, ExpertShape, Scratch, decode_down, decode_gate_up
from vllm_dymoe.kernels.triton.step import DecodeStep
from vllm_dymoe.kernels.triton.tiles import Tiles
from vllm_dymoe.residency.code import FP8, MXFP4, NESTED, NVFP4, UPPER_HALVES, WHOLE
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.decode_rule import decide_plain
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.residency.table import Counter, Table, check_integrity, set_pools, set_precision
from vllm_dymoe.systems.dymoe import Dymoe

EXPERTS, TOP_K, BITS = 6, 2, {LOW: 2, HIGH: 4}
SILU, FLOAT16 = Activation.SILU, torch.float16
WITHOUT_GATE = Activation(Curve.RELU2, has_gate=False)


class Layer:
    """One layer's experts in a "host" and slots on a "device"; nested: the low version lies inside the high one."""

    def __init__(self, shares, *, split, bits=BITS, staging=0, tokens=4, activation=SILU, nested=False):
        self.activation, has_gate = activation, activation.has_gate
        self.shape = ExpertShape(150, 70, 32, FLOAT16, True, has_gate=has_gate, nested=bits[HIGH] if nested else 0)
        self.bits, self.nested = bits, nested
        self.experts = {code: Experts(self.shape, [width] * EXPERTS, 100 * code) for code, width in bits.items()}
        formats = {
            code: Format(
                150, 70, {LOW: UPPER_HALVES, HIGH: NESTED}[code][bits[HIGH]] if nested else WHOLE[width], 32, FLOAT16,
                True, has_gate=has_gate,
            )
            for code, width in bits.items()
        }  # fmt: skip
        high = self.experts[HIGH]
        self.stored = {LOW: high.blobs, HIGH: high.fine} if nested else {c: e.blobs for c, e in self.experts.items()}
        self.table = Table.allocate(1, EXPERTS, rows=tokens, top_k=TOP_K, depth=1, device=DEVICE, nested=nested)
        set_precision(self.table, formats, Dymoe(retention=0.5).precision.critical_counts(1, EXPERTS))
        self.slots = {
            code: torch.full((shares[code] + staging, fmt.nbytes), 0xEE, dtype=torch.uint8, device=DEVICE)
            for code, fmt in formats.items()
        }
        pools = {code: (slots.data_ptr(), slots.shape[1], len(slots)) for code, slots in self.slots.items()}
        set_pools(self.table, pools, {code: [shares[code]] for code in bits})
        for code, blobs in self.stored.items():
            self.table.source[0, :, code] = torch.tensor([blob.data_ptr() for blob in blobs])
        tile = DecodeTile(4, split)
        tiles = Tiles(4, tile, tile, (), ())
        memory = torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device=DEVICE)
        semaphores = torch.zeros(1 << 10, dtype=torch.int32, device=DEVICE)
        self.step = DecodeStep(self.shape, frozenset(bits.values()), tiles, activation, memory, semaphores)

    def run(self, x, ids, weights, real=None):
        """The output and the decision."""
        decision = Decision.allocate(len(x), TOP_K, EXPERTS, DEVICE, slices=1 + self.nested)
        out = poisoned(*x.shape, dtype=FLOAT16)
        count = rows(len(x) if real is None else real).to(DEVICE)
        self.step.run(vars(self.table), 0, x, ids, weights, count, decision.tensors, out)
        assert not self.step.semaphores.any()
        return out, decision

    def resident(self, x, ids, weights, decision):
        """The same experts from the store itself: unweighted, then combined."""
        count, tile = int(decision.count), self.step.tiles.down
        chosen = [(int(e), int(t)) for e, t in zip(decision.experts[:count], decision.tiers[:count], strict=True)]
        first = [self.stored[LOW if self.nested else code][expert].data_ptr() for expert, code in chosen]
        fine = [self.stored[HIGH][expert].data_ptr() if code == HIGH else 0 for expert, code in chosen]
        table = table_of_blobs(
            self.shape, first, [self.bits[code] for _, code in chosen], DEVICE, fine=fine if self.nested else None
        )
        pairs = [[(t, k) for t in range(len(x)) for k in range(TOP_K) if ids[t, k] == expert] for expert, _ in chosen]
        work = work_list(pairs, TOP_K)
        scratch = Scratch(self.step.memory.view(torch.float32), self.step.semaphores)
        hidden, out = (poisoned(len(x) * TOP_K, columns, dtype=FLOAT16) for columns in (70, 150))
        decode_gate_up(x, hidden[: work.positions], table, work, self.activation, tile, scratch)
        decode_down(hidden[: work.positions], out, table, work, tile, scratch)
        return combine(out, weights, ids)

    def check_slots(self):
        """Every row names the bytes of the store."""
        named = {LOW: (self.table.slot[0], 1), HIGH: (self.table.slot[1], 2)} if self.nested else {}
        for expert in range(EXPERTS):
            code = int(self.table.tier[0, expert])
            for part, (slots, least) in (named or {code: (self.table.slot[0], 1)}).items():
                if code >= least:
                    assert torch.equal(self.slots[part][int(slots[0, expert])], self.stored[part][expert])


def route(seed, tokens):
    """Every token has expert 0, and another one."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randint(1, EXPERTS, (tokens, 1), generator=generator)
    ids = torch.cat((torch.zeros_like(others), others), 1)
    return ids.to(DEVICE), torch.rand(tokens, TOP_K, generator=generator).to(DEVICE)


@pytest.mark.parametrize(
    ("share", "split", "bits", "staging", "activation", "nested"),
    [
        (0, 2, BITS, 0, SILU, False),
        (0, 2, BITS, 1, SILU, False),
        (2, 3, {LOW: 8, HIGH: 16}, 0, SILU, False),
        (0, 2, {LOW: 2, HIGH: NVFP4.tag}, 1, SILU, False),
        (2, 2, {LOW: MXFP4.tag, HIGH: FP8.tag}, 0, WITHOUT_GATE, False),
        (0, 2, BITS, 1, SILU, True),
        (2, 2, BITS, 0, SILU, True),
        (3, 3, {LOW: 4, HIGH: 8}, 0, SILU, True),
    ],
)
def test_residency_changes_no_bit(share, split, bits, staging, activation, nested):
    """Read through, through a staging slot (expert 0, with its three positions), fetched to be kept, and found."""
    shares = {LOW: share, HIGH: max(0, share - 1) if nested else share}
    layer = Layer(shares, split=split, bits=bits, staging=staging, activation=activation, nested=nested)
    for tokens in (3, 1):
        x, (ids, weights) = random_x(tokens, 150, FLOAT16, tokens), route(0, tokens)
        out, decision = layer.run(x, ids, weights)
        assert torch.equal(out, layer.resident(x, ids, weights, decision))
        assert bool(decision.slots[0, 0] >= 0) == (share > 0 or (staging > 0 and tokens > 2))
        check_integrity(layer.table.on_host(), ranges=True)
        layer.check_slots()
    counts = layer.table.counters[0]
    assert counts[Counter.FETCHED_HIGH] > 0
    assert bool(counts[Counter.HITS]) == bool(share)
    assert bool(counts[Counter.PASSED]) == (shares[HIGH] < 2)


def test_the_step_against_float64_and_the_plain_decision():
    layer = Layer({LOW: 2, HIGH: 2}, split=2)
    plain = type(layer.table)(**{name: values.cpu().clone() for name, values in vars(layer.table).items()})
    x, (ids, weights) = random_x(2, 150, FLOAT16), route(3, 2)
    out, _ = layer.run(x, ids, weights)
    decision = Decision.allocate(2, TOP_K, EXPERTS, "cpu")
    decide_plain(plain, 0, ids.cpu(), weights.cpu(), rows(2), decision)
    want = torch.zeros(2, 150, dtype=torch.float64)
    for expert, code in zip(decision.experts.tolist(), decision.tiers.tolist(), strict=True):
        for t, k in (ids == expert).nonzero().tolist() if expert >= 0 else ():
            reference = layer.experts[code].reference(expert, x[t : t + 1], SILU)[0]
            want[t] += float(weights[t, k]) * reference
    assert relative_error(out, want) < TOLERANCE[FLOAT16]


def test_rows_without_an_expert_are_zero():
    """Padding, and tokens all of whose experts another rank has: whatever the output held is gone."""
    layer = Layer({LOW: 2, HIGH: 2}, split=2)
    ids = torch.tensor([[1, 2], [-1, -1], [3, -1], [0, 1]], device=DEVICE)
    out, _ = layer.run(random_x(4, 150, FLOAT16), ids, torch.ones(4, TOP_K, device=DEVICE), real=3)
    assert out.any(1).tolist() == [True, False, True, False]
    out, _ = layer.run(random_x(4, 150, FLOAT16), ids, torch.ones(4, TOP_K, device=DEVICE), real=0)
    assert not out.any()


def traced(planted=lambda ids: None):
    """The launches of a step on tensors without values, with everything refused that asks for the host."""
    launches = []

    def start(kernel, grid, tensors, constants, options):
        assert all(isinstance(value, int) or value.device.type == "meta" for value in tensors)
        launches.append((kernel.__name__, grid))

    with NoHost():
        shape = ExpertShape(256, 128, 32, torch.bfloat16)
        tile = DecodeTile(4, 2)
        empty = lambda *size, dtype=torch.float32: torch.empty(size, dtype=dtype, device="meta")  # noqa: E731
        step = DecodeStep(
            shape, frozenset((4,)), Tiles(4, tile, tile, (), ()), SILU,
            empty(1 << 20, dtype=torch.uint8), empty(1 << 12, dtype=torch.int32),
        )  # fmt: skip
        table = {name: empty(*size, dtype=dtype) for name, (size, dtype) in sizes(Table).items()}
        decision = {name: empty(*size, dtype=dtype) for name, (size, dtype) in sizes(Decision).items()}
        ids = empty(4, TOP_K, dtype=torch.int64)
        planted(ids)
        x = empty(4, 256, dtype=torch.bfloat16)
        count = empty(1, dtype=torch.int32)
        step.run(table, 0, x, ids, empty(4, TOP_K), count, decision, torch.empty_like(x), start=start)
    return launches


def sizes(kind):
    made = (
        Decision.allocate(4, TOP_K, EXPERTS, "cpu")
        if kind is Decision
        else Table.allocate(3, EXPERTS, rows=4, top_k=TOP_K, depth=1, device="cpu")
    )
    return {
        name: (values.shape, values.dtype) for name, values in vars(made).items() if isinstance(values, torch.Tensor)
    }


def test_a_step_is_three_launches_without_a_host():
    """Grids are those of the shape alone: of 4 tokens and 6 experts at most 6 items, and one that asks for zeros."""
    launches = traced()
    assert launches == [("decide_kernel", (1,)), ("gate_up_kernel", (2, 6, 2)), ("down_kernel", (4, 7, 2))]


@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        (lambda ids: ids.max().item(), "waits for the device"),
        (lambda ids: ids.nonzero(), "waits for the device"),
        (lambda ids: ids.unique(), "waits for the device"),
        (lambda ids: ids.cpu(), "moves values between cpu and meta"),
        (lambda ids: ids.copy_(torch.zeros(4, TOP_K, dtype=torch.int64)), "moves values between cpu and meta"),
    ],
)
def test_a_planted_look_at_the_device_is_found(planted, sentence):
    with pytest.raises(HostInStepError, match=sentence):
        traced(planted)


def test_too_little_memory_is_named():
    layer = Layer({LOW: 2, HIGH: 2}, split=2)
    step = DecodeStep(
        layer.shape, layer.step.tiers, layer.step.tiles, SILU, layer.step.memory[:1000], layer.step.semaphores
    )
    ids, weights = route(0, 1)
    decision = Decision.allocate(1, TOP_K, EXPERTS, DEVICE)
    x = random_x(1, 150, FLOAT16)
    with pytest.raises(ValueError, match=r"1 tokens of 2 experts need \d+ bytes, but 1000 are held"):
        step.run(vars(layer.table), 0, x, ids, weights, rows(1).to(DEVICE), decision.tensors, x)
