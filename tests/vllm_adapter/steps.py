"""Steps as vLLM's scheduler describes them."""

from types import SimpleNamespace


def scheduled(*tokens, drafted=None, new=(), reading=(), finished=()):
    """A step of requests "a", "b", ... that compute so many tokens each.

    Args:
        drafted: how many of them are drafted, by request.
        new: what the scheduler says of requests that are new.
        reading: names of those that were scheduled before and have not answered yet.
        finished: names of those that have ended.
    """
    counts = dict(zip("abcdefghijkl", tokens, strict=False))
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(tokens),
        scheduled_spec_decode_tokens={name: [7] * count for name, count in (drafted or {}).items()},
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(is_context_phase=set(reading).__contains__),
        finished_req_ids=set(finished),
    )
