"""A table twice: one for the plain rule, one for the programs, which have to leave it bit for bit the same."""

import torch

from tests.kernels.sections import DEVICE
from tests.support.decode_steps import make_table, rows
from vllm_dymoe.kernels.triton.ahead import name_ahead
from vllm_dymoe.kernels.triton.decide import decide
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.decode_ahead import Copies, name_ahead_plain
from vllm_dymoe.residency.decode_rule import decide_plain


def moved(record, place):
    """A table or a decision with every tensor elsewhere."""
    return type(record)(
        **{name: place(values) for name, values in vars(record).items() if isinstance(values, torch.Tensor)}
    )


class Twins:
    """Two tables in the same state, one for each writing."""

    def __init__(self, shares, *, place=lambda values: values.to(DEVICE, copy=True), **options):
        self.plain, self.place = make_table(shares, **options), place
        self.table = moved(self.plain, place)

    def foresee(self, layer, ids, scores, real=None):
        """Name what is fetched ahead with both; the plain copies, once everything was compared."""
        tokens, guesses = ids.shape
        count = rows(tokens if real is None else real)
        expected = Copies.allocate(tokens, guesses, self.plain.experts, "cpu")
        name_ahead_plain(self.plain, layer, ids, scores, count, expected)
        found = moved(Copies.allocate(tokens, guesses, self.plain.experts, "cpu"), self._soiled)
        place = self.place
        name_ahead(vars(self.table), layer, place(ids), place(scores), place(count), vars(found))
        assert torch.equal(expected.spans, found.spans.cpu())
        self.compare()
        return expected

    def step(self, layer, ids, weights, real=None):
        """Decide with both; the plain decision, once everything was compared."""
        tokens, top_k = ids.shape
        count = rows(tokens if real is None else real)
        expected = Decision.allocate(tokens, top_k, self.plain.experts, "cpu", slices=1 + self.plain.nested)
        found = moved(expected, self._soiled)
        decide_plain(self.plain, layer, ids, weights, count, expected)
        place = self.place
        decide(
            vars(self.table),
            layer,
            place(ids),
            place(weights),
            place(count),
            found.tensors,
            there=bool(self.plain.there.any()),
        )
        for name, values in expected.tensors.items():
            if name != "scratch":
                assert torch.equal(values, getattr(found, name).cpu()), name
        self.compare()
        return expected

    def compare(self):
        for name, values in vars(self.plain).items():
            assert torch.equal(values, getattr(self.table, name).cpu()), name

    def _soiled(self, values):
        return self.place(values.clone()).fill_(77)
