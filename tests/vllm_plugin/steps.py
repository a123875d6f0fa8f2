"""Steps as vLLM's scheduler describes them, and a rank without an engine."""

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
    """Return a step whose requests "a", "b", ... compute the given numbers of tokens.

    Args:
        drafted: number of drafted tokens, by request.
        new: the scheduler's data of new requests.
        reading: names of requests that were scheduled before and have not answered yet.
        finished: names of requests that have ended.
        computed: number of tokens computed before, by request.
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
    ranks = []
    failures = StepFailures(
        step,
        late=server.small_batches is not None,
        on_failure=observation.forget,
        on_device=lambda number: ranks[0].device_failure(number),
    )
    ranks.append(RankServer(server, step, failures, predictor_observer, observation, drafted))
    return ranks[0]
