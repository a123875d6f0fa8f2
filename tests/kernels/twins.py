"""A table twice: for the plain rule and for the programs, which must agree."""

import numpy as np
import torch

from tests.kernels.sections import DEVICE
from tests.support.decode_steps import make_table, own_ids, rows
from vllm_dymoe.kernels.triton.large_batch import counted_parts, plan_large_batch_on_gpu
from vllm_dymoe.kernels.triton.planner import plan_small_batch_on_gpu
from vllm_dymoe.planner.constants import PROJECTIONS
from vllm_dymoe.planner.large_batch import LargeBatchWork, plan_large_batch
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.small_batch import plan_small_batch

STEPS = 2, 4, 8  # positions of an expert in each class of a large-batch step


def moved(record, place):
    """Copy a table or a plan, with every tensor at another address."""
    return type(record)(
        **{name: place(values) for name, values in vars(record).items() if isinstance(values, torch.Tensor)}
    )


class Twins:
    """Two tables in the same state, one for each implementation.

    Args:
        numbers: the rank's numbers of the experts of all ranks, to which the steps' ids belong; None if it has all.
    """

    def __init__(self, quotas, *, place=lambda values: values.to(DEVICE, copy=True), numbers=None, **options):
        self._numbers, all_experts = numbers, 0 if numbers is None else len(numbers)
        self.plain, self.place = make_table(quotas, all_experts=all_experts, **options), place
        self.table = moved(self.plain, place)

    def stage(self, layer, seed):
        """Put some experts into staging slots, as if they had been prefetched.

        They are there whole or in part.
        """
        rng, half = np.random.default_rng(seed), layer % 2
        staged = torch.zeros_like(self.plain.staged[half])
        order = iter(rng.permutation(self.plain.experts))
        for code in (LOW, HIGH):
            first, count = self.plain.staging[layer, code].tolist()
            for slot, expert in zip(range(first, first + count), order, strict=False):
                number = code - 1 if self.plain.nested else 0
                staged[number, :, expert] = torch.tensor((slot, code, rng.integers(1, PROJECTIONS + 1)))
        for table in (self.plain, self.table):
            table.staged[half].copy_(staged)
            table.staged_for[half] = layer

    def step(self, layer, ids, weights, real=None, **told):
        """Plan with both and compare everything; returns the plain plan."""
        tokens, top_k = ids.shape
        count = rows(tokens if real is None else real)
        ids, global_ids = self._of_rank(ids)
        expected = LayerPlan.allocate(tokens, top_k, self.plain.experts, "cpu", slices=1 + self.plain.nested)
        found = moved(expected, self._soiled)
        plan_small_batch(self.plain, layer, ids, weights, count, expected, global_ids=global_ids, **told)
        placed, told["on_cpu"] = map(self.place, (ids, weights, count)), bool(self.plain.cpu_costs.any())
        told["global_ids"] = None if global_ids is None else self.place(global_ids)
        plan_small_batch_on_gpu(self.table.at(layer), layer, *placed, found.tensors, **told)
        for name, values in expected.tensors.items():
            if name != "scratch":
                assert torch.equal(values.nan_to_num(7), getattr(found, name).cpu().nan_to_num(7)), name
        self.compare()
        return expected

    def large_batch_step(self, layer, ids, weights, shape, half, real, marks=None, ahead=0, steps=STEPS):
        """Plan a large-batch step with both; compare every list as far as it is read."""
        classes = _classes(shape, steps)
        plan, large = _of_shape(shape, classes, lambda values: values)
        found, lists = _of_shape(shape, classes, self._soiled)
        found.bits[-1] = 0
        ids, global_ids = self._of_rank(ids)
        told = {"large": True, "marks": marks, "weights_on_input": shape.weights_on_input}
        plan_small_batch(self.plain, layer, ids, weights, rows(real), plan, global_ids=global_ids, **told)
        plan_large_batch(self.plain, layer, ids, plan, shape, half, ahead, classes, large)
        on_cpu = [values.to(DEVICE) for values in (ids, weights, rows(real))]
        counted = on_cpu[0] if global_ids is None else global_ids.to(DEVICE)
        parts = None if marks is None else counted_parts(counted, on_cpu[1], marks.to(DEVICE))
        plan_large_batch_on_gpu(
            self.table.at(layer), layer, *on_cpu, found.tensors, shape, half, ahead, steps, vars(lists), parts,
            global_ids=None if global_ids is None else global_ids.to(DEVICE),
        )  # fmt: skip
        copies = shape.spans(shape.groups if ahead else shape.groups - 1).stop if shape.streamed_groups else shape.items
        for name, values in vars(large).items():
            mine = slice(copies if name == "spans" else None)
            assert torch.equal(values[mine].nan_to_num(7), getattr(lists, name)[mine].cpu().nan_to_num(7)), name
        count = int(plan.count)
        assert int(found.count) == count
        pairs = int((large.ids >= 0).sum())
        for name in ("rows", "pairs"):
            assert torch.equal(getattr(plan, name)[:pairs], getattr(found, name)[:pairs].cpu()), name
        for name in ("addresses", "action"):
            assert torch.equal(getattr(plan, name)[:, :count], getattr(found, name)[:, :count].cpu()), name
        assert not found.bits[-1].any()
        self.compare()

    def compare(self):
        for name, values in vars(self.plain).items():
            assert torch.equal(values, getattr(self.table, name).cpu()), name

    def _of_rank(self, ids):
        """Return a step's ids as the rank numbers them, and as all ranks do, or None."""
        return (ids, None) if self._numbers is None else (own_ids(self._numbers, ids), ids)

    def _soiled(self, values):
        return self.place(values.clone()).fill_(77)


def _classes(shape, steps):
    """Return the classes in which an expert with this many tokens may be.

    They are those of ``TritonLargeBatch``.
    """
    return steps[: max(2, 1 + sum(step < shape.tokens for step in steps[:-1]))]


def _of_shape(shape, classes, place):
    sizes = {"slices": shape.slices, "scratch": shape.scratch}
    plan = LayerPlan.allocate(shape.tokens, shape.top_k, shape.experts, "cpu", **sizes)
    return moved(plan, place), moved(LargeBatchWork.allocate(shape, classes, "cpu"), place)
