"""Steps as vLLM's scheduler describes them, and a rank that runs them without the vLLM around it."""

from types import SimpleNamespace

from vllm_dymoe.options import Options
from vllm_dymoe.vllm_plugin.failures import StepFailures
from vllm_dymoe.vllm_plugin.gates import PredictorObserver
from vllm_dymoe.vllm_plugin.observers import Observation
from vllm_dymoe.vllm_plugin.rank_server import RankServer
from vllm_dymoe.vllm_plugin.step import RunningStep


def prompt(name, tokens, computed=0):
    tokens = list(tokens)
    return SimpleNamespace(req_id=name, prompt_token_ids=tokens, prompt_embeds=None, num_computed_tokens=computed)


def scheduled(*tokens, drafted=None, new=(), reading=(), finished=(), computed=None):
    """A step of requests "a", "b", ... that compute so many tokens each.

    Args:
        drafted: how many of them are drafted, by request.
        new: what the scheduler says of requests that are new.
        reading: names of those that were scheduled before and have not answered yet.
        finished: names of those that have ended.
        computed: by request how many tokens were computed before.
    """
    counts = dict(zip("abcdefghijkl", tokens, strict=False))
    names = [name for name in counts if name not in {request.req_id for request in new}]
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(tokens),
        scheduled_spec_decode_tokens={name: [7] * count for name, count in (drafted or {}).items()},
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            num_computed_tokens=[(computed or {}).get(name, 0) for name in names],
            is_context_phase=set(reading).__contains__,
        ),
        finished_req_ids=set(finished),
    )


def rank_of(server, drafted=0, observation=None):
    step, predictor_observer = RunningStep(), PredictorObserver(Options(policy="on-demand"))
    observation = observation or Observation()
    failures = StepFailures(step, on_failure=observation.forget)
    return RankServer(server, step, failures, predictor_observer, observation, drafted)
