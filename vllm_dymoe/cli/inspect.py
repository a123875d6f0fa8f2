"""``vllm-dymoe inspect``: what a store or a checkpoint holds.

It also says which budgets can serve it.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from vllm_dymoe.cache.budget import limit_in_bytes, minimum_budget, plan_slots, used_precisions, workspace_bytes
from vllm_dymoe.cache.pages import available_host_memory
from vllm_dymoe.cache.store import (
    MANIFEST,
    FileStore,
    HostRoom,
    Manifest,
    StoreError,
    choose_host_place,
    whole_host_cache,
)
from vllm_dymoe.cache.store.disk import known_rates
from vllm_dymoe.cli.display import byte_progress, print_table
from vllm_dymoe.experts.format import ModelExperts, all_keys
from vllm_dymoe.options import ConfigError, ExpertBudget, Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.policies import Policy
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.model_config import read_config
from vllm_dymoe.quantize.readers.base import store_group_sizes
from vllm_dymoe.quantize.tensors import read_tensors
from vllm_dymoe.units import size

_SHARES = (0.25, 0.5, 1.0)
_TABLES = {
    "versions": "Experts",
    "errors": "Relative errors by bits",
    "memory_tiers": "What each memory tier would hold",
    "budgets": "Budgets, kernel workspace included",
}
_SAID = {"ordered": "bits with reordered columns", "fallbacks": "not calibrated"}
_NOT_KNOWN = {
    "disk": "not measured yet; the first start does it",
    "errors": "not recorded; this store was written by an older vllm-dymoe, or holds random experts",
}


def run(path: Path, budget: str = "25%", host_memory: str = "auto", *, verify: bool, as_json: bool) -> None:
    """Print what ``path`` contains.

    ``verify`` reads a whole store, and raises ConfigError for a checkpoint without one.
    """
    ExpertBudget.parse(budget)  # validated even if it is not used
    if (path / MANIFEST).is_file() or _is_ours(path):
        store = FileStore(path)
        try:
            report = _describe_store(store)
            report["memory_tiers"] = _memory_tiers(store.experts, budget, host_memory)
            if verify:
                _verify(store)
                report["verified"] = True
                if not store.manifest.binds:
                    report["shards"] = _bind(store)
        finally:
            store.close()
    elif verify:
        raise ConfigError(f"{path} holds no packed experts, so it has no checksums to verify.")
    else:
        report = _describe_checkpoint(Checkpoint.open(path))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


def _is_ours(path: Path) -> bool:
    if not (path / "config.json").is_file():
        return False
    return (read_config(path).get("quantization_config") or {}).get("quant_method") == "dymoe"


def _describe_store(store: FileStore) -> dict[str, Any]:
    manifest, experts = store.manifest, store.experts
    checkpoint = _is_ours(store.folder)
    rank, ranks = manifest.tensor_parallel
    rates = known_rates(store.folder)  # in bytes per second, measured by a start
    bits = sorted(experts.formats, reverse=True)
    return {
        "kind": "dymoe checkpoint" if checkpoint else "expert store",
        "folder": str(store.folder),
        "model": manifest.model,
        "quantizer": manifest.quantizer,
        "tensor_parallel": {"rank": rank, "size": ranks},
        **({"dense_bytes": sum(p.nbytes for p in read_tensors(store.folder).values())} if checkpoint else {}),
        **_describe_experts(experts),
        "format_version": manifest.version,
        "shards": "bound to layer and model"
        if manifest.binds
        else "not bound, so an exchanged shard would go unnoticed; run with --verify",
        "alignment": manifest.alignment,
        "disk": None if rates is None else {**asdict(rates), "depth": rates.depth},
        "errors": _describe_errors(manifest),
        "budgets": _budgets(experts, Options.model_validate({"high": bits[0], "low": bits[1] if len(bits) > 1 else 0})),
    }


def _memory_tiers(experts: ModelExperts, budget: str, host_memory: str) -> list[dict[str, Any]]:
    """Return the experts and bytes of each memory tier at the highest bits.

    The device has memory of its own.
    """
    options, workspace = Options.model_validate({"high": max(experts.formats), "low": 0}), workspace_bytes(experts)
    limit = limit_in_bytes(ExpertBudget.parse(budget), experts, options, workspace, 0)
    slots = plan_slots(experts, options, Exact(), limit, workspace).slots[Precision.HIGH]
    room = HostRoom(available_host_memory(), wanted=ExpertBudget.parse(host_memory))
    held, all_ = choose_host_place("auto", "cuda", experts, room).host_cache, len(experts.layers) * experts.num_experts
    rows = (
        ("device", budget, slots, limit),
        ("host memory", host_memory, held * all_ // whole_host_cache(experts), held),
    )
    names = "memory tier", "budget", "experts", "bytes"
    return [dict(zip(names, row, strict=True)) for row in (*rows, ("disk", "", all_, experts.stored_nbytes))]


def _describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    options, reader, kind = Options(), checkpoint.reader, "not quantized yet"
    if reader.held:
        kind = f"experts quantized with {reader.method} at {reader.bits} bits"
        options = Options.model_validate({"high": reader.bits, "group_size": store_group_sizes(reader, 0, 1)[0]})
    elif reader.mixed:
        kind = f"experts in several formats, {reader.method}"
    experts = checkpoint.model_experts((16, 8, 4, 2), options.group_size, checkpoint.dtype)
    return {
        "kind": f"MoE checkpoint, {kind}",
        "folder": str(checkpoint.folder),
        "model": checkpoint.fingerprint(),
        "dense_bytes": checkpoint.dense_bytes,
        "expert_bytes": checkpoint.expert_bytes,
        **_describe_experts(experts),
        "budgets": _budgets(experts, options),
    }


def _describe_experts(experts: ModelExperts) -> dict[str, Any]:
    fmt = next(iter(experts.formats.values()))
    return {
        "layers": list(experts.layers),
        "num_experts": experts.num_experts,
        "top_k": experts.top_k,
        "hidden_size": fmt.hidden,
        "intermediate_size": fmt.intermediate,
        "dtype": str(fmt.dtype).removeprefix("torch."),
        "group_size": fmt.group_size,
        "ordered": [bits for bits, version in experts.formats.items() if version.act_order],
        "versions": [
            {"bits": bits, "expert_bytes": version.whole_nbytes, "total_bytes": experts.nbytes(bits)}
            for bits, version in sorted(experts.formats.items(), reverse=True)
        ],
    }


def _describe_errors(manifest: Manifest) -> list[dict[str, Any]] | None:
    """Return relative errors by layer and bit-width; None if they were not recorded."""
    errors = manifest.errors
    if errors is None:
        return None
    return [
        {
            "layer": layer,
            "weight": {str(bits): found[position] for bits, found in errors.weight.items()},
            "output": {str(bits): found[position] for bits, found in errors.output.items()},
            "fallbacks": list(errors.fallbacks[position]) if errors.fallbacks else [],
        }
        for position, layer in enumerate(manifest.experts.layers)
    ]


def _budgets(experts: ModelExperts, options: Options) -> list[dict[str, Any]]:
    """Return the smallest feasible budget and some shares.

    For each, returns the experts of each precision that a layer keeps.
    """
    workspace = workspace_bytes(experts)
    policies: list[Policy] = [Exact(), Dymoe()] if options.low else [Exact()]
    rows = []
    for policy in policies:
        limits = {"smallest": minimum_budget(experts, options, policy, workspace)}
        for share in _SHARES:
            limits[f"{share:.0%}"] = limit_in_bytes(ExpertBudget(share=share), experts, options, workspace, 0)
        for name, limit in limits.items():
            if limit >= limits["smallest"]:
                plan = plan_slots(experts, options, policy, limit, workspace)
                kept = {
                    precision.value: min(plan.quotas[precision])
                    for precision in used_precisions(options, policy.precision.precisions)
                }
                rows.append(
                    {"precisions": list(kept), "expert_budget": name, "bytes": limit, "experts_kept_per_layer": kept}
                )
    return rows


def _verify(store: FileStore) -> None:
    experts = store.experts
    buffers = {bits: torch.empty(fmt.nbytes, dtype=torch.uint8) for bits, fmt in experts.formats.items()}
    with byte_progress(f"Verifying {escape(store.folder.name)}", experts.stored_nbytes) as advance:
        for key in all_keys(experts):
            store.read_into(key, buffers[key.bits])
            advance(buffers[key.bits].nbytes)


def _bind(store: FileStore) -> str:
    """Bind a verified older store to its shards, if it can be written.

    Returns:
        the outcome in words.
    """
    try:
        store.bind()
    except StoreError as error:
        return f"not bound to layer and model: {error}"
    return f"now bound to layer and model; the manifest had version {store.manifest.version}"


def _print(report: dict[str, Any]) -> None:
    """Print lists of rows as one table each, everything else as one table."""
    tables = {name: rows for name, rows in report.items() if isinstance(rows, list) and name in _TABLES}
    facts = [(_words(name), escape(_text(name, value))) for name, value in report.items() if name not in tables]
    facts = [fact for fact in facts if fact[1]]
    print_table(escape(report["folder"]), (), facts)
    for name, rows in tables.items():
        heads = [head for head in rows[0] if any(row[head] not in ([], {}) for row in rows)]
        print_table(
            _TABLES[name], list(map(_words, heads)), [[_text(head, row[head]) for head in heads] for row in rows]
        )


def _words(name: str) -> str:
    return _SAID.get(name, name.replace("_", " "))


def _text(name: str, value: Any) -> str:
    if value is None:
        return _NOT_KNOWN.get(name, "")
    if isinstance(value, dict):
        return ", ".join(f"{_words(str(key))}: {_text(name, part)}" for key, part in value.items())
    if isinstance(value, list):
        return f"{value[0]} to {value[-1]}" if name == "layers" else ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value / 1e9:.2g} GB/s" if name == "disk" else f"{value:.2%}"
    return size(value) if name.endswith("bytes") else str(value)
