from vllm_dymoe.predict import Candidate, Predictor
from vllm_dymoe.predict.all_experts import AllExperts


def test_every_expert_of_the_next_layer_and_nothing_after_the_last():
    predictor: Predictor = AllExperts(num_layers=3, num_experts=4)
    assert predictor.predict(0) == [Candidate(1, expert, 1.0) for expert in range(4)]
    assert [candidate.layer for candidate in predictor.predict(1)] == [2] * 4
    assert predictor.predict(2) == []
