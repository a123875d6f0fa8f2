"""Systems: each a paper's way of serving experts, in a file of its own. One that is new has a file and a line here."""

from pydantic import ValidationError

from vllm_dymoe.config import Options
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.systems.base import System, SystemOptionError
from vllm_dymoe.systems.duoserve import DuoServe
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.dynaexq import DynaExq
from vllm_dymoe.systems.exact import Exact
from vllm_dymoe.systems.firm import Firm
from vllm_dymoe.systems.layer_prefetch import LayerPrefetch
from vllm_dymoe.systems.on_demand import OnDemand

SYSTEMS: dict[str, type[System]] = {
    system.name: system for system in (Exact, OnDemand, LayerPrefetch, Dymoe, DuoServe, Firm, DynaExq)
}
"""By the name that the option ``system`` has for it, the default first."""


def make_system(options: Options) -> System:
    """The system that options name, with its parameters; SystemOptionError if it does not exist, has no such parameter
    or not with that value, or cannot be served with the other options."""
    name, parameters = options.system, options.system_options
    if name not in SYSTEMS:
        raise SystemOptionError("system", f'system "{name}" does not exist; choose one of {", ".join(SYSTEMS)}')
    kind = SYSTEMS[name]
    try:
        system = kind(**parameters)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg'][0].lower()}{item['msg'][1:]}" for item in error.errors()
        )
        known = ", ".join(kind.model_fields) or "none"
        raise SystemOptionError(
            "system_options", f'system "{name}" does not take these system_options ({problems}); it has {known}'
        ) from error
    if options.lo == 0 and Tier.HI not in system.precision.tiers:
        raise SystemOptionError(
            "system", f'system "{name}" as it is set would skip every expert with lo = 0; set lo to 2, 4 or 8'
        )
    if system.residency.migrating is not None and options.lo == 0:
        raise SystemOptionError("system", f'system "{name}" keeps a low version of every expert; set lo to 2, 4 or 8')
    if options.predictor is not None and not (system.foresight and system.foresight.takes_predictor):
        raise SystemOptionError("predictor", f'system "{name}" as it is set has no use for a predictor; leave it out')
    return system
