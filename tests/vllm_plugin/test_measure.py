"""What the child process of ``vllm-dymoe bench`` counts; a test plays the engine."""

from types import SimpleNamespace

import pytest

from vllm_dymoe.vllm_plugin.measure import answer, token_ids


class Engine:
    """An engine whose steps bring each request to a number of tokens."""

    def __init__(self, *steps):
        self.steps, self.asked, self.calls = list(steps), [], []

    def add_request(self, name, prompt, sampling):
        self.asked.append(name)

    def has_unfinished_requests(self):
        return bool(self.steps)

    def step(self):
        self.calls.append("step")
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=range(tokens), finish_reason=None, stop_reason=None)],
            )
            for name, tokens in self.steps.pop(0).items()
        ]

    def rpc(self, method):
        self.calls.append(method)
        return [{}]


@pytest.mark.parametrize("ours", [True, False])
def test_decoding_begins_when_every_request_has_its_first_token(ours):
    engine = Engine({"x-0": 1}, {"x-0": 2, "x-1": 1}, {"x-0": 3, "x-1": 2}, {"x-1": 4})
    llm = SimpleNamespace(llm_engine=engine, collective_rpc=engine.rpc)
    found = answer(llm, [([5], 3), ([5, 6], 4)], "x", ours=ours)
    assert engine.asked == ["x-0", "x-1"]
    assert found.lengths == [3, 4]
    assert len(found.between) == 4, "x-0's second token came before"
    assert found.decoded == 4, "x-1's last two came at once"
    assert found.since == max(found.first) < found.seconds
    if ours:
        assert engine.calls == ["step", "step", "dymoe_reset_stats", "step", "step", "dymoe_stats"]


def test_prompts_that_do_not_fit_are_not_left_out_silently():
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=8))
    tokenizer = SimpleNamespace(encode=lambda text: [1] * len(text))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), get_tokenizer=lambda: tokenizer)
    job = {"prompts": [("abc", None), ("too long", None), ("de", 6), ("f", None)], "random_length": None}
    workload = {"requests": 2, "warm_up": 1, "max_tokens": 4, "random": False}
    assert [(len(ids), tokens) for ids, tokens in token_ids(llm, job, workload)] == [(3, 4), (2, 6), (1, 4)]
    with pytest.raises(SystemExit, match="3 of 4 prompts fit"):
        token_ids(llm, job, {**workload, "requests": 3})
