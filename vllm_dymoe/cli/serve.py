"""``vllm-dymoe serve``: chooses how to serve, and becomes ``vllm serve``.

It looks at the machine and the model, and says what it has chosen.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from vllm_dymoe.cli.display import print_table
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.here import choose_here
from vllm_dymoe.plan.machine import Machine, read_machine
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.start import PROMPT, REQUESTS, Asked, Start, choose, read_model
from vllm_dymoe.resolve import options_of_additional, options_of_environment
from vllm_dymoe.units import size

_SHORT = {"-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-pp": "pipeline-parallel-size",
          "-ep": "enable-expert-parallel", "-q": "quantization"}  # fmt: skip
_POWERS = 10**3, 10**6, 10**9, 10**12, 2**10, 2**20, 2**30, 2**40
_UNITS = dict(zip("kmgtKMGT", _POWERS, strict=True))  # of vLLM's numbers
_OURS = "additional-config"


@dataclass(frozen=True)
class Arguments:
    """The user's arguments of ``vllm serve``, as far as choices depend on them."""

    passed: tuple[str, ...]  # as they were written, without additional_config
    values: Mapping[str, str]  # by name; "true" for a flag
    additional: Mapping[str, Any]  # additional_config

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Arguments":
        """Read the arguments of ``vllm serve``.

        Raises:
            ConfigError: JSON is invalid, or another quantization is asked for.
        """
        passed, values, additional = list[str](), dict[str, str](), dict[str, Any]()
        place = 0
        while place < len(words):
            word, place = words[place], place + 1
            name, equals, value = word.partition("=")
            if not name.startswith("-"):
                passed.append(word)
                continue
            written = [word]
            if not equals and place < len(words) and re.match(r"[^-]|-\d", words[place]):
                value, place = words[place], place + 1
                written.append(value)
            name = _SHORT.get(name, name.lstrip("-").replace("_", "-"))
            if name == _OURS:
                additional = _merged(additional, _json(value))
            elif name.startswith(f"{_OURS}."):
                additional = _merged(additional, _nested(name.split(".")[1:], value))
            else:
                passed += written
                values.pop(name, None)  # the last one counts, and comes last
                values[name] = value or "true"
        if (other := values.get("quantization", "dymoe")) != "dymoe":
            raise ConfigError(f"--quantization {other} is not served by this command; use `vllm serve` for it.")
        return cls(tuple(passed), values, additional)

    def number(self, name: str) -> int | None:
        """Return an integer as vLLM reads it: 8192, 8k, 8K or 1T.

        None if it was not given, or is automatic.
        """
        text = self.values.get(name)
        if text is None or text.lower() in ("auto", "-1"):
            return None
        try:
            return int(float(text[:-1]) * _UNITS[text[-1]]) if text[-1] in _UNITS else int(text)
        except ValueError:
            raise ConfigError(f"--{name} {text} is no number.") from None

    def flag(self, name: str) -> bool | None:
        """Return what a flag says, also with "no-"; None if it was not given."""
        given = [word for word in self.values if word in (name, f"no-{name}")]
        return given[-1] == name if given else None

    def asked(self, environment: Mapping[str, str]) -> Asked:
        """Return what the arguments decide; everything else is open."""
        share, space = self.values.get("gpu-memory-utilization"), environment.get("VLLM_CPU_KVCACHE_SPACE")
        gib = _read("VLLM_CPU_KVCACHE_SPACE", space, int, "a whole number of GiB such as 40")
        bytes_ = self.number("kv-cache-memory-bytes")
        tp, dp, pp = (self.number(f"{kind}-parallel-size") or 1 for kind in ("tensor", "data", "pipeline"))
        return Asked(
            options=options_of_environment(environment) | options_of_additional(self.additional.get("dymoe")),
            max_model_len=self.number("max-model-len"),
            max_num_seqs=self.number("max-num-seqs"),
            max_num_batched_tokens=self.number("max-num-batched-tokens"),
            kv_cache_dtype=self.values.get("kv-cache-dtype"),
            prefix_caching=self.flag("enable-prefix-caching"),
            gpu_memory_utilization=_read("--gpu-memory-utilization", share, float, "a share such as 0.9"),
            kv_cache_space=bytes_ / 2**30 if bytes_ else gib,
            ranks=Ranks(tp, dp, pp, self.values.get("enable-expert-parallel", "false") != "false"),
        )


def run(model: str, words: Sequence[str], machine: Path | None, *, dry_run: bool, retune: bool) -> None:
    """Choose, print, and replace this process by ``vllm serve``.

    A dry run prints only.

    Raises:
        ConfigError: nothing fits.
    """
    if model.startswith("-"):
        raise ConfigError(f"the model comes before all other arguments: `vllm-dymoe serve MODEL {model} ...`.")
    arguments = Arguments.parse(words)
    if "config" in arguments.values:
        raise ConfigError("this command cannot see the settings in the file of --config; write them as arguments.")
    asked, token = arguments.asked(os.environ), arguments.values.get("hf-token")
    found = read_model(model, arguments.values.get("revision"), token == "true" or token)
    if machine is not None:
        here = read_machine(machine)
        start = choose(here, found, asked)
    else:
        here, start = choose_here(found, asked, arguments.passed, retune=retune)
    command = command_of(model, arguments, start)
    show(model, here, start, command)
    if machine is None and not dry_run:
        program = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if program is None:
            raise ConfigError("the command `vllm` is not installed here; docs/quickstart.md says how to install it.")
        sys.stdout.flush()
        os.execve(program, [program, *command[1:]], os.environ | dict(start.environment))


def command_of(model: str, arguments: Arguments, start: Start) -> list[str]:
    """Return the equivalent ``vllm serve``.

    It has the user's own arguments, and after them what was chosen. What the user left to vLLM, as with
    ``--max-model-len auto``, stays so.
    """
    added = [(f"--{name}", value) for name, value in start.arguments.items() if name not in arguments.values]
    chosen = [word for pair in added for word in pair if word]
    quantization = [] if "quantization" in arguments.values else ["--quantization", "dymoe"]
    additional = {**arguments.additional, "dymoe": start.options}
    return ["vllm", "serve", model, *arguments.passed, *quantization, *chosen, f"--{_OURS}", json.dumps(additional)]


def show(model: str, machine: Machine, start: Start, command: Sequence[str]) -> None:
    """Print what was chosen and why, the table of contexts, and the command to paste."""
    rows = [("machine", *describe(machine)), *start.reasons]
    rows.append(
        ("expected", f"{start.tokens_per_second:.3g} tokens/s", f"first token of {PROMPT} after {start.ttft:.2g} s")
    )
    print_table(escape(model), ("", "chosen", "why"), rows, left=True)
    heads = "context", *(f"{count} request{'s' * (count > 1)}" for count in REQUESTS)
    body = [
        (str(tokens), *("does not fit" if speed is None else f"{speed:.3g}" for speed in speeds))
        for tokens, speeds in start.table
    ]
    print_table("Tokens/s of each request with its whole context in the KV cache", heads, body)
    said = " ".join(f"{name}={value}" for name, value in start.environment.items())
    typer.echo(f"The equivalent command:\n{f'{said} {shlex.join(command)}'.strip()}")


def describe(machine: Machine) -> tuple[str, str]:
    """Return the description of a machine in two cells."""
    gpus = machine.gpus
    link = f"link {gpus[0].link / 1e9:.1f}, " if gpus else ""
    disk = "" if machine.disk is None else f", disk {machine.disk / 1e9:.1f}"
    nodes = f" on {machine.numa_nodes} nodes" if machine.numa_nodes > 1 else ""
    what = f"{len(gpus)} x {gpus[0].name}" if gpus else f"{machine.cores} cores{nodes}"
    if machine.disturbed:
        return what, f"measured while others used {machine.others:.0%} of the cores, so not kept"
    return what, (
        f"GB/s: {link}memory {machine.memory_rate / 1e9:.0f} ({size(machine.host_memory)}), "
        f"experts {machine.experts[0].read / 1e9:.1f} ({machine.kernel.rpartition(', ')[2]}){disk}"
    )


def _read(name: str, text: str | None, kind: Callable[[str], float], what: str) -> float | None:
    """Return a number that the user wrote; None if there is none."""
    try:
        return kind(text) if text else None
    except ValueError:
        raise ConfigError(f"{name} is {text}, not {what}.") from None


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--additional-config is not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ConfigError("--additional-config has to be a JSON object.")
    return found


def _nested(names: Sequence[str], text: str) -> dict[str, Any]:
    """Return what vLLM makes of ``--additional-config.dymoe.high 8``."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for name in reversed(names):
        value = {name.replace("-", "_"): value}
    found: dict[str, Any] = value
    return found


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merged(one[key], value) for key, value in other.items() if isinstance(one.get(key), dict)}
    return {**one, **other, **both}
