"""Policies: ways of serving experts, one file each.

A new policy needs a file and a line in ``POLICIES``.
"""

from pydantic import ValidationError

from vllm_dymoe.options import Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.policies.adaptive import Adaptive
from vllm_dymoe.policies.base import Policy, PolicyOptionError
from vllm_dymoe.policies.duoserve import DuoServe
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.dynaexq import DynaExq
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.firm import Firm
from vllm_dymoe.policies.layer_prefetch import LayerPrefetch
from vllm_dymoe.policies.on_demand import OnDemand
from vllm_dymoe.policies.papers import PAPERS

_OURS: tuple[type[Policy], ...] = (Exact, OnDemand, LayerPrefetch, Dymoe, DuoServe, Firm, DynaExq, Adaptive)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (*_OURS, *PAPERS)}
"""Policies by the name that the option ``policy`` takes, the default first."""


def make_policy(options: Options) -> Policy:
    """Return the policy that the options name, with its parameters.

    Raises PolicyOptionError for an unknown policy or parameter, an invalid value, or a combination of options that the
    policy cannot serve.
    """
    name, parameters = options.policy, options.policy_options
    if name not in POLICIES:
        raise PolicyOptionError("policy", f'policy "{name}" does not exist; choose one of {", ".join(POLICIES)}')
    kind = POLICIES[name]
    try:
        policy = kind(**parameters)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg'][0].lower()}{item['msg'][1:]}" for item in error.errors()
        )
        known = ", ".join(kind.model_fields) or "none"
        raise PolicyOptionError(
            "policy_options", f'policy "{name}" does not take these policy_options ({problems}); it has {known}'
        ) from error
    if options.low == 0 and Precision.HIGH not in policy.precision.precisions:
        raise PolicyOptionError(
            "policy", f'policy "{name}" as set would skip every expert if low = 0; set low to 2, 4 or 8'
        )
    if policy.residency.migrating is not None and options.low == 0:
        raise PolicyOptionError("policy", f'policy "{name}" keeps a low version of every expert; set low to 2, 4 or 8')
    if options.predictor is None and policy.prefetch is not None and policy.prefetch.needs_predictor:
        raise PolicyOptionError(
            "predictor", f'policy "{name}" needs a trained network; train one with `vllm-dymoe train` and name its file'
        )
    for option in ("predictor", "train_predictor"):
        if getattr(options, option) is not None and not (policy.prefetch and policy.prefetch.takes_predictor):
            raise PolicyOptionError(option, f'policy "{name}" as set does not use a predictor; leave it out')
    return policy
