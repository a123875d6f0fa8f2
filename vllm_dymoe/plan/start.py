"""How to serve a model on a machine.

The choice is a pure function of both, and of what the user's arguments leave open. Every combination of what is open
is a candidate: policy and precision, 8-bit dense layers, the type of the KV cache, and whether the CPU computes
misses. All are planned with the KV cache and the experts that fit at the same time. The fastest whose answers are good
enough wins; of those within a twentieth, the one that changes least. What the server itself measures at its start, how
misses are served and what budget fits, is predicted here and left to it.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

from vllm_dymoe.cache.budget import limit_in_bytes, minimum_budget, workspace_bytes
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import CHECKPOINT_OPTIONS, ConfigError, ExpertBudget, Options
from vllm_dymoe.plan.choice import CANDIDATES, GOOD_ENOUGH, Choice, ServeSettings, chunk_of, predict, room_for_experts
from vllm_dymoe.plan.machine import Machine
from vllm_dymoe.plan.model import Attention, ModelShape, attention_of, config_folder, read_shape
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.routings import Routings, made_up
from vllm_dymoe.policies import make_policy
from vllm_dymoe.quantize.model_config import ModelConfig, nested_configs, read_config
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.readers.base import kept_format
from vllm_dymoe.resolve import resolve_options
from vllm_dymoe.units import size

REQUESTS = 1, 4, 16  # concurrent ones, of the table
PROMPT = 512  # tokens of the prompt whose first token is planned
_CACHED = 1024  # tokens of a request's KV cache that a decode step reads, on average
_LENGTHS = 4096, 16384, 65536
_SPEED_KEPT = 0.9  # of the shortest context's, by the context that is chosen
_NEAR = 1.3  # times as long as the fastest is near enough for the rest to be tried
_SAME = 1.05  # times as long is as fast
_KV_SHARES = {"auto": 1.0, "fp8": 0.5}  # of 16 bits
_CPU_KV_SHARE = 4  # a CPU's KV cache gets a quarter of the memory at most
_BLOCK = 256  # tokens of a block of the KV cache at most; a CPU has 128, for some models 16 or 256
_UNKNOWN_LENGTH = 2048  # vLLM's context, if config.json names none


@dataclass(frozen=True)
class Model:
    """What config.json says of a model."""

    name: str  # of the folder with its config.json
    shape: ModelShape
    fixed: Mapping[str, Any] = field(default_factory=dict)  # options that the checkpoint decides
    quantized: bool = False  # its dense layers may be
    attention: Attention = "full"


@dataclass(frozen=True)
class Asked:
    """What the user's own arguments say; None is open."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of additional_config.dymoe and the environment
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_space: float | None = None  # GiB of a CPU's KV cache
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True)
class Start:
    """What was chosen, and why."""

    options: Mapping[str, Any]  # of the plugin, as a user writes them
    arguments: Mapping[str, str]  # of ``vllm serve``, by name, that the user left open; "" for a flag
    environment: Mapping[str, str]
    reasons: Sequence[tuple[str, str, str]]  # subject, what was chosen, why
    tokens_per_second: float  # of all concurrent requests together
    tpot: float  # seconds of a decode step
    ttft: float  # seconds to the first token of a prompt
    table: Sequence[tuple[int, Sequence[float | None]]]
    """Tokens of context, and tokens per second of one request for each number of ``REQUESTS``; None does not fit."""


def read_model(name: str, revision: str | None = None, token: str | bool | None = None) -> Model:
    """Read the config.json of a folder, or of a model on the hub.

    Raises:
        ConfigError, CheckpointError: the model cannot be served.
    """
    folder = config_folder(name, revision, token)
    name, shape = str(folder), read_shape(str(folder))
    config = read_config(folder)
    said, attention = config.get("quantization_config") or {}, attention_of(nested_configs(config)[-1])
    if isinstance(said, Mapping) and said.get("quant_method") == "dymoe":
        fixed = {option: said[key] for key, option in CHECKPOINT_OPTIONS.items() if key in said}
        return Model(name, shape, fixed, quantized=said.get("dense") is not None, attention=attention)
    if (quantization := ModelConfig(folder).quantization) is None:
        return Model(name, shape, attention=attention)
    usual = make_reader(quantization, None).usual
    bits = usual[0].bits
    if usual[0].held:
        like = shape.packed((bits,)).formats[bits]
        shape = replace(shape, kept=kept_format(usual, like, shape.intermediate, 1))
    return Model(name, shape, {"high": bits, "low": 0}, quantized=True, attention=attention)


@dataclass(frozen=True)
class _Setup:
    """A candidate, before it is known how much of it fits."""

    given: Mapping[str, Any]  # options
    kv_cache_dtype: str
    options: Options
    experts: ModelExperts


@dataclass(frozen=True)
class Planned:
    """A candidate on the machine."""

    choice: Choice
    kv_cache_dtype: str
    kv_cache: int  # bytes
    chunk: int  # tokens of a step
    complete: bool  # all experts are in host memory, or on the GPU


def _kind(setup: _Setup) -> str:
    return f"{setup.options.policy} {setup.options.high} {setup.options.low}"


class Planner:
    """One model on one machine, for what the user leaves open."""

    def __init__(self, machine: Machine, model: Model, asked: Asked) -> None:
        asked.ranks.check()
        self.machine, self.model, self.asked = machine, model, asked
        self.shape = asked.ranks.shape(model.shape)
        self.on_gpu = bool(machine.gpus)
        self.device = asked.ranks.device(machine.device())
        self.spare_memory = machine.spare_memory // asked.ranks.on_machine  # bytes of each rank
        self.longest = asked.max_model_len or model.shape.longest or _UNKNOWN_LENGTH
        self.requests = min(asked.max_num_seqs or 1, max(REQUESTS))
        self._routings: dict[int, Routings] = {}
        self._planned: dict[tuple[object, ...], Planned | None] = {}
        self._setups = tuple(self._all_setups())
        self._serving = ServeSettings(
            max_num_seqs=asked.max_num_seqs or max(REQUESTS),
            max_num_batched_tokens=asked.max_num_batched_tokens or ServeSettings.max_num_batched_tokens,
            gpu_memory_utilization=asked.gpu_memory_utilization or ServeSettings.gpu_memory_utilization,
        )

    def _all_setups(self) -> Iterator[_Setup]:
        """Yield every combination of what is open.

        Those that cannot be served are left out.
        """
        asked, model, seen = self.asked.options, self.model, set[str]()
        dense = (16,) if model.quantized else (16, 8)
        gpus, shape = self.machine.gpus, model.shape
        halved = bool(gpus) and shape.kv_heads > 1 and gpus[0].capability >= shape.fp8_from
        kinds = ("auto", "fp8") if halved else ("auto",)
        kinds = kinds if self.asked.kv_cache_dtype is None else (self.asked.kv_cache_dtype,)
        misses = ("auto", "share") if self.on_gpu else ("auto",)
        known = {candidate["policy"] for candidate in CANDIDATES}
        bases = [*CANDIDATES] if asked.get("policy", "exact") in known else [{"policy": asked["policy"]}]
        for base, bits, kind, way in itertools.product(bases, dense, kinds, misses):
            given = {**base, "dense": bits, "misses": way, **model.fixed, **asked}
            one_version = model.fixed.get("low") == 0 and "low" in base
            if given["policy"] != base["policy"] or one_version:
                continue
            if not self.on_gpu and "policy" not in asked and given["policy"] != "exact":
                continue  # what hides a link is of no use to a CPU
            if (text := json.dumps([given, kind], sort_keys=True, default=str)) in seen:
                continue
            seen.add(text)
            try:
                options = resolve_options(given, environment={})
            except ConfigError:
                continue
            yield _Setup(given, kind, options, self.shape.packed(tuple(options.stored_bits), options.group_size))

    def routings(self, batch: int) -> Routings:
        """Return synthetic choices of the model's routers, for so many requests."""
        if batch not in self._routings:
            whole, ranks = self.model.shape, self.asked.ranks
            sizes = whole.experts, whole.top_k, whole.hidden
            identity = ModelIdentity(self.model.name, "planned", self.shape.moe_layers, *sizes)
            self._routings[batch] = made_up(identity, batch * ranks.dp if ranks.meets else batch).spread(
                ranks.experts_over
            )
        return self._routings[batch]

    def plan(self, setup: _Setup, length: int, requests: int, cached: int = _CACHED) -> Planned:
        """Plan a candidate for so many requests.

        Args:
            length: tokens of each request.
            cached: tokens of each request's KV cache that a step reads.

        Raises:
            ConfigError: the candidate does not fit.
        """
        options, experts, shape = setup.options, setup.experts, self.shape
        kv_share = _KV_SHARES.get(setup.kv_cache_dtype, 0.5 if "8" in setup.kv_cache_dtype else 1.0)
        blocks = requests * ceil(length / _BLOCK) + 1  # one is vLLM's own
        kv_cache = int(shape.kv_bytes * kv_share * _BLOCK * blocks)
        reads = shape.kv_bytes * kv_share * min(cached, length) * requests
        policy, workspace = make_policy(options), workspace_bytes(experts, "cuda" if self.on_gpu else "cpu")
        least = minimum_budget(experts, options, policy, workspace)
        whose = max(requests, options.expert_budget.requests)  # KV cache stays free
        spare, device, chunk = self.spare_memory, self.device, 0
        serving = replace(self._serving, max_model_len=length)
        if self.on_gpu:
            room = self._room(serving, least, options, kv_share, whose)
            if self.asked.max_num_batched_tokens is None:
                resident = limit_in_bytes(options.expert_budget, experts, options, workspace, room)
                missing = max(0, experts.nbytes(options.high) - resident)
                chunk = max(serving.max_num_batched_tokens, chunk_of(missing, shape, device))
                serving = replace(serving, max_num_batched_tokens=chunk)
                room = self._room(serving, least, options, kv_share, whose)
            complete = spare >= experts.stored_nbytes
        else:
            room = spare - shape.memory_of_dense(options.dense) - self.kv_space(kv_cache)
            complete = room >= experts.stored_nbytes
            if not complete:  # "auto" gives slots a half, and the page cache the other
                spare = room // 2
                room = spare if options.expert_budget.is_auto else room
        if options.misses == "share" and not complete:
            raise ConfigError("misses can be shared with the CPU only if host memory has all experts.")
        budget = options.expert_budget
        if self.on_gpu and budget.is_auto and not policy.residency.keeps:
            budget = ExpertBudget(slots="top-k")
        limit = limit_in_bytes(budget, experts, options, workspace, room)
        if (needed := max(limit, least)) > room:
            many = "one request" if requests == 1 else f"{requests} requests"
            ours = "" if budget.is_auto else "expert_budget, "
            raise ConfigError(
                f"{size(needed)} of experts do not fit beside the KV cache of {many} of {length} tokens, which leaves "
                f"them {size(max(0, room))}; lower {ours}--max-model-len or --max-num-seqs."
            )
        device = replace(device, host_memory=None if complete else spare)
        tokens = serving.max_num_batched_tokens
        return Planned(
            predict(setup.given, limit, 1.0, shape, device, self.routings(requests), PROMPT, tokens,
                    cached=reads, costs=self.machine.costs),
            setup.kv_cache_dtype, kv_cache, chunk, complete,
        )  # fmt: skip

    def _room(self, serving: ServeSettings, least: int, options: Options, kv_share: float, requests: int) -> int:
        return room_for_experts(
            self.shape, self.device, serving, least, dense=options.dense, kv_share=kv_share, requests=requests,
            automatic=options.expert_budget.is_auto,
        )  # fmt: skip

    def kv_space(self, kv_cache: int) -> int:
        """Return the bytes of a CPU's KV cache.

        They are what the user set; otherwise ``kv_cache`` in whole GiB.

        Raises:
            ConfigError: experts would lack them.
        """
        if self.asked.kv_cache_space is not None:
            return int(self.asked.kv_cache_space * 2**30)
        space = max(1, -(-kv_cache // 2**30)) << 30
        if space > max(1 << 30, self.spare_memory // _CPU_KV_SHARE):
            raise ConfigError(
                f"a KV cache of {size(space)} is more than a quarter of the memory; lower --max-model-len."
            )
        return space

    def tried(self, setup: _Setup, length: int, requests: int, cached: int = _CACHED) -> Planned | None:
        """Return the result of :meth:`plan`; None if the candidate does not fit."""
        key = id(setup.options), setup.kv_cache_dtype, length, requests, cached
        if key not in self._planned:
            try:
                self._planned[key] = self.plan(setup, length, requests, cached)
            except ConfigError:
                self._planned[key] = None
        return self._planned[key]

    @property
    def lengths(self) -> list[int]:
        """Contexts of the table, the shortest first."""
        return [*(length for length in _LENGTHS if length < self.longest), self.longest]

    def length(self, setup: _Setup) -> int:
        """Return the context length for a candidate.

        It is the user's; otherwise the longest whose KV cache leaves experts nine tenths of the speed.
        """
        if self.asked.max_model_len is not None:
            return self.longest
        planned = [(length, found) for length in self.lengths if (found := self.tried(setup, length, self.requests))]
        if not planned:
            return self.lengths[0]
        slowest = planned[0][1].choice.tpot / _SPEED_KEPT
        return max(length for length, found in planned if found.choice.tpot <= slowest)

    def candidates(self, *, all_of_them: bool = False) -> list[tuple[_Setup, int, Planned]]:
        """Return candidates that fit, with the context that each was planned for.

        First one candidate of each policy and precision is planned. Everything else that is open is tried only for
        those that are nearly as fast as the fastest, unless ``all_of_them`` are asked for.

        Raises:
            ConfigError: no candidate fits.
        """
        setups = self._setups
        if not setups:
            resolve_options({**self.model.fixed, **self.asked.options}, environment={})  # its sentence
            raise ConfigError(f"nothing can be served with {json.dumps(dict(self.asked.options))}; change the options.")
        first = list({_kind(setup): setup for setup in reversed(setups)}.values())
        lengths: dict[str, int] = {}

        def planned(some: Iterable[_Setup]) -> list[tuple[_Setup, int, Planned]]:
            found = []
            for setup in some:
                if setup.kv_cache_dtype not in lengths:
                    lengths[setup.kv_cache_dtype] = self.length(setup)
                length = lengths[setup.kv_cache_dtype]
                if (one := self.tried(setup, length, self.requests)) is not None:
                    found.append((setup, length, one))
            return found

        found = planned(setups if all_of_them else first)
        good = [one for one in found if self.good(one[0], one[2].choice)]
        if good and not all_of_them:
            near = _NEAR * min(one.choice.tpot for *_, one in good)
            kinds = {_kind(setup) for setup, _, one in good if one.choice.tpot <= near}
            found += planned(setup for setup in setups if _kind(setup) in kinds and setup not in first)
        elif not found:
            found = planned(setups)  # a smaller KV cache may fit
        if not found:
            smallest = min(setups, key=self._size)
            self.plan(smallest, self.length(smallest), 1)  # its sentence
            raise ConfigError(f"{self.requests} concurrent requests do not fit; lower --max-num-seqs.")
        return found

    def _size(self, setup: _Setup) -> tuple[int, int, bool]:
        """Return what orders candidates by the memory that they need."""
        options = setup.options
        dense = self.shape.memory_of_dense(options.dense)
        return setup.experts.nbytes(options.high), dense, setup.kv_cache_dtype == "auto"

    def whole(self, planned: Planned, requests: int) -> Choice:
        """Return what was planned for one rank, with the time for all ranks."""
        device = self.machine.device()
        return self.asked.ranks.whole(planned.choice, self.model.shape, device, requests, PROMPT)

    def good(self, setup: _Setup, choice: Choice) -> bool:
        """Return whether a precision is good enough, or not ours to choose."""
        told = {**self.model.fixed, **self.asked.options}.keys()
        return bool(told & {"high", "low", "quantizer"}) or (choice.agreement or 0) >= GOOD_ENOUGH

    def chosen(self) -> tuple[_Setup, int, Planned]:
        """Return the best candidate; the module says which that is."""
        found = [one for one in self.candidates() if self.good(one[0], one[2].choice)]
        if not found:
            raise ConfigError("nothing whose answers are good enough fits; lower --max-model-len or --max-num-seqs.")
        fastest = min(planned.choice.tpot for *_, planned in found)

        def changes_least(one: tuple[_Setup, int, Planned]) -> tuple[float, ...]:
            setup, _, planned = one
            return (
                planned.choice.agreement or 0, setup.options.dense, setup.kv_cache_dtype == "auto",
                setup.options.misses == "auto", -planned.choice.tpot,
            )  # fmt: skip

        return max((one for one in found if one[2].choice.tpot <= _SAME * fastest), key=changes_least)


def choose(machine: Machine, model: Model, asked: Asked) -> Start:
    """Choose everything that is open; ConfigError if nothing fits."""
    planner = Planner(machine, model, asked)
    setup, length, planned = planner.chosen()
    whole = planner.whole(planned, planner.requests)
    options = {key: value for key, value in setup.given.items() if key not in model.fixed}
    options |= {key: value for key, value in _budget(planner, setup, planned).items() if key not in asked.options}
    options = {key: value for key, value in options.items() if key in asked.options or value != _default(key)}
    if "misses" not in asked.options:
        options.pop("misses", None)  # a GPU's server measures both ways at its start
    arguments = {"max-model-len": str(length)} if asked.max_model_len is None else {}
    if asked.kv_cache_dtype is None and setup.kv_cache_dtype != "auto":
        arguments["kv-cache-dtype"] = setup.kv_cache_dtype
    if planned.chunk > ServeSettings.max_num_batched_tokens:
        arguments["max-num-batched-tokens"] = str(planned.chunk)
    prefixes = prefix_caching(asked.prefix_caching, setup.options, model.attention, on_gpu=planner.on_gpu)
    if asked.prefix_caching is None and prefixes[0] == "off":
        arguments["no-enable-prefix-caching"] = ""
    environment = {}
    if not planner.on_gpu and asked.kv_cache_space is None:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(planner.kv_space(planned.kv_cache) >> 30)

    def speed_of(tokens: int, requests: int) -> float | None:
        found = planner.tried(setup, tokens, requests, tokens)
        return None if found is None else 1 / planner.whole(found, requests).tpot

    table = [(tokens, [speed_of(tokens, requests) for requests in REQUESTS]) for tokens in planner.lengths]
    reasons = list(_reasons(planner, setup, length, planned, options, prefixes))
    speed = planner.requests / whole.tpot
    return Start(options, arguments, environment, reasons, speed, whole.tpot, whole.ttft, table)


def _default(option: str) -> Any:
    return "auto" if option == "expert_budget" else Options.model_fields[option].default


def _budget(planner: Planner, setup: _Setup, planned: Planned) -> dict[str, Any]:
    """Return the budget, and where experts are.

    On a CPU slots are no faster than memory, so a few of them are enough.
    """
    if not planner.on_gpu:
        return {"expert_budget": "top-k", "host_store": "pinned"} if planned.complete else {}
    keeps = make_policy(setup.options).residency.keeps
    return {"expert_budget": f"auto for {planner.requests} requests"} if keeps and planner.requests > 1 else {}


def prefix_caching(
    asked: bool | None, options: Options, attention: Attention, *, on_gpu: bool
) -> tuple[Literal["on", "off", "auto"], str]:
    """Return whether prefixes are cached, and why; "auto" leaves it to vLLM.

    vLLM caches prefixes by default, if it can for a model. A cached prefix saves chunks that would fetch nearly every
    expert, so it is left on even if the precision of experts follows traffic. Then a cached token keeps the precision
    that it was computed at, as a token of an earlier chunk does.

    Args:
        asked: what the user set.
    """
    if asked is not None:
        return "on" if asked else "off", "set by you"
    if options.trace is not None:
        return "off", "cached tokens would be missing from the trace"
    if attention == "recurrent":
        return "auto", "vLLM decides, as some layers are recurrent"
    if attention == "latent" and not on_gpu:
        return "auto", "vLLM decides, as few CPUs can for MLA"
    if len(make_policy(options).precision.precisions) > 1:
        return "on", "cached tokens keep their precision"
    return "on", "prefixes are computed once"


def _dense_of_checkpoint(planner: Planner) -> str:
    """Return how a quantized checkpoint stores dense layers, and their planned rate."""
    shape, machine = planner.shape, planner.machine
    if shape.unknown:
        return f"the checkpoint decides; planned at 16 bits, because {shape.unknown}"
    if (held := shape.held) is None:
        return "the checkpoint decides: 16 bits"
    said = f"the checkpoint decides: {held.format}"
    if planner.on_gpu:
        return f"{said}, {size(held.nbytes)}"
    kernels = {rate.kernel for rate in machine.dense if rate.format == held.format}
    if kernels:
        return f"{said}, measured with {', '.join(sorted(kernels))}"
    return f"{said}; planned as fast as 16 bits, because it was not measured{_because(machine.unmeasured)}"


def _why_context(planner: Planner, length: int) -> str:
    if planner.asked.max_model_len is not None:
        return "set by you"
    if not planner.model.shape.longest:
        return "vLLM's, as config.json names none; --max-model-len sets another"
    return "the model's longest" if length == planner.longest else "the longest that leaves experts 90 % of their speed"


def _because(why: str) -> str:
    return f" ({why}; try again with --retune)" if why else " on this machine"


def _reasons(
    planner: Planner,
    setup: _Setup,
    length: int,
    planned: Planned,
    options: Mapping[str, Any],
    prefixes: tuple[str, str],
) -> Iterator[tuple[str, str, str]]:
    choice, asked, model, settled = planned.choice, planner.asked, planner.model, setup.options
    stored, everything = setup.experts.stored_nbytes, setup.experts.nbytes(settled.high)

    def why(option: str, reason: str) -> str:
        return "set by you" if option in asked.options else reason

    yield "policy", settled.policy, why("policy", "the fastest on this machine that is good enough")
    agreement = "" if choice.agreement is None else f"{choice.agreement:.0%} of likeliest tokens as at 16 bits; "
    of_checkpoint = "the checkpoint's" if "high" in model.fixed else f"{agreement}the fastest good enough"
    bits = f"{settled.high}/{settled.low} bits" if settled.low else f"{settled.high} bits"
    yield "precision", bits, why("high", of_checkpoint)
    dense = f"{size(planner.shape.read_of_dense(settled.dense))} for each step"
    kept = "as they are", _dense_of_checkpoint(planner)
    yield "dense layers", *(kept if model.quantized else (f"{settled.dense} bits", why("dense", dense)))
    if planner.on_gpu:
        share = min(1.0, choice.limit / everything)
        room, note = f"{size(choice.limit)} of {size(everything)} on the GPU, {choice.hit_rate:.0%} hits", ""
        room, exact = f"{room}; the KV cache comes first", str(options.get("expert_budget", "auto"))
        if share == 1.0 and stored == everything:
            room, note = f"{size(everything)} on the GPU", "; all fit, so compare with plain vLLM"
        yield "expert budget", exact, why("expert_budget", room) + note
        where = f"{size(stored)} in memory" if planned.complete else f"part of {size(stored)} on the disk"
        way = "shared with the CPU" if settled.misses == "share" else "fetched"
        way = f"probably {way}, measured at start" if planned.complete else way
        yield "misses", options.get("misses", "auto"), why("misses", f"{way}; {where}")
    else:
        where = "all in memory, computed in place" if planned.complete else "not all fit into memory: from the disk"
        yield "experts", size(stored), why("expert_budget", where)
    yield "context", f"{length} tokens", _why_context(planner, length)
    cache = size(planned.kv_cache) if planner.on_gpu else size(planner.kv_space(planned.kv_cache))
    many = f"{planner.requests} contexts" if planner.requests > 1 else "one context"
    cached, why_cached = prefixes
    yield "KV cache", f"{setup.kv_cache_dtype}, prefix caching {cached}", f"at least {cache} for {many}; {why_cached}"
    given, ours = asked.max_num_batched_tokens, planned.chunk > ServeSettings.max_num_batched_tokens
    reason = f"computed while the link brings {size(max(0, everything - choice.limit))}" if ours else "vLLM's choice"
    tokens = given or (planned.chunk if ours else "auto")
    yield "tokens of a step", str(tokens), "set by you" if given else reason
