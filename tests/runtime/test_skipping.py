"""Routing weights of skipped experts."""

import torch

from vllm_dymoe.runtime.skipping import absent_pairs, renormalized

IDS = torch.tensor([[0, 1, 2], [2, 0, -1], [2, 3, 2]])
WEIGHTS = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.6, 0.3, 0.1]])


def test_absent_are_the_pairs_that_nobody_computes():
    # Expert 0 has the pairs 0 and 4, expert 1 the pair 1; 2 and 3 are skipped, -1 is another rank's.
    absent = absent_pairs([torch.tensor([0, 4]), torch.tensor([1])], IDS)
    assert absent.tolist() == [[False, False, True], [True, False, True], [True, True, True]]
    assert absent_pairs([], IDS).all()


def test_the_others_take_over_the_weights():
    absent = absent_pairs([torch.tensor([0, 4]), torch.tensor([1])], IDS)
    weights = renormalized(WEIGHTS, absent, IDS)
    kept = weights.masked_fill(absent, 0)
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.375, 0]))
    # Of 0.8 on this rank half was skipped; the other rank's 0.2 is its own affair.
    torch.testing.assert_close(kept[1], torch.tensor([0, 0.8, 0]))
    assert kept[2].tolist() == [0, 0, 0], "nothing stays, and nothing is divided by zero"
    assert torch.isfinite(weights).all()
