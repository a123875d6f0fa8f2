"""Every variant that is compiled ahead of time, and how: no GPU, no driver.

A variant is a kernel, the shape and tiles that it gets, and the architecture. The shapes are those of one large and one
small model, so that both ends of the table of tiles are there.
"""

import ast
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_dymoe.kernels.triton import Tiles, choose_tiles
from vllm_dymoe.kernels.triton.decode import down_kernel, gate_up_kernel
from vllm_dymoe.kernels.triton.grouped import grouped_gate_up_kernel, grouped_linear_kernel
from vllm_dymoe.kernels.triton.section import DESCRIPTIONS

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one program may have, from NVIDIA's compute capability table."""

TIERS = {"16": 16, "8": 8, "4": 4, "2": 2, "4/2": 6, "16/4": 20}
SHAPES = {"Qwen3-30B-A3B": (2048, 768), "Mixtral-8x7B": (4096, 14336)}
GROUP = 64
MIXED = (90,)
"""Architectures for which mixes of tiers and the decode kernels' options are compiled too: each takes half a minute."""

KERNELS = {
    "gate_up": gate_up_kernel,
    "down": down_kernel,
    "grouped_gate_up": grouped_gate_up_kernel,
    "grouped_linear": grouped_linear_kernel,
}
_TYPES = {
    "addresses": "*i64",
    "destinations": "*i64",
    "bits": "*i32",
    "items": "*i32",
    "rows": "*i64",
    "pairs": "*i64",
    "sources": "*i64",
    "targets": "*i64",
    "weights": "*fp32",
    "computed": "*i32",
    "partials": "*fp32",
    "tickets": "*i32",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Variant:
    """One kernel to compile.

    Attributes:
        architecture: such as 90.
        kernel: name in KERNELS.
        model: name in SHAPES.
        tiers: name in TIERS.
        note: what is special about it: dtype, fetch, tile.
        constants: the kernel's compile-time arguments.
        options: num_warps and num_stages.
        float16: activations in float16 and not bfloat16.
    """

    architecture: int
    kernel: str
    model: str
    tiers: str
    note: str
    constants: dict[str, Any] = field(compare=False)
    options: dict[str, Any] = field(compare=False)
    float16: bool = False

    @property
    def decode(self) -> bool:
        """Whether it may not spill."""
        return not self.kernel.startswith("grouped")

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it apart, as the first columns of the table."""
        return self.architecture, self.kernel, self.model, self.tiers, self.note


@dataclass(frozen=True)
class Report:
    """What the compiler made.

    Attributes:
        registers: for each thread.
        spill_bytes: of each thread's local memory.
        shared_bytes: of a program.
        tensor_cores: mma, wgmma or tcgen05 if the PTX has such instructions, else "".
        barriers_in_loops: barriers inside the longest innermost loop: with none, its threads exchange nothing.
        instructions: of that loop.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_cores: str
    barriers_in_loops: int
    instructions: int


def all_variants() -> Iterator[Variant]:
    """Every variant of every architecture."""
    for architecture in ARCHITECTURES:
        for model in SHAPES:
            yield from variants(architecture, model)


def variants(architecture: int, model: str) -> Iterator[Variant]:
    """Those of one architecture and model."""
    hidden, intermediate = SHAPES[model]
    tiles = choose_tiles(architecture, hidden, intermediate)
    if model == "Mixtral-8x7B":  # other tiles, the same code otherwise
        if architecture in MIXED:
            yield from _decode(architecture, model, "4/2", tiles, "")
        return
    for tiers, mask in TIERS.items():
        if mask not in (16, 8, 4, 2) and architecture not in MIXED:
            continue
        yield from _decode(architecture, model, tiers, tiles, "")
        if tiers != "16/4":  # the two branches of it are there one by one, and a tile's registers do not add up
            yield from _grouped(architecture, model, tiers, tiles)
    if architecture not in MIXED:
        return
    yield from _decode(architecture, model, "4/2", tiles, "fetch")
    for note in ("fp16", "bias, swiglu_oai"):
        yield next(_decode(architecture, model, "4/2", tiles, note))


def _decode(architecture: int, model: str, tiers: str, tiles: Tiles, note: str) -> Iterator[Variant]:
    hidden, intermediate = SHAPES[model]
    common = {"GROUP": GROUP, "TIERS": TIERS[tiers], "BIAS": "bias" in note, "FETCH": note == "fetch"}
    for kernel, tile, rows, columns in (
        ("gate_up", tiles.gate_up, intermediate, hidden),
        ("down", tiles.down, hidden, intermediate),
    ):
        split = 1 if note == "fetch" else tile.split
        constants = {**common, "ROWS": rows, "COLUMNS": columns, "SPLIT": split, "WARPS": tile.warps}
        if kernel == "gate_up":
            constants["ACTIVATION"] = 3 if "swiglu_oai" in note else 0
        else:
            constants |= {"TOP_K": 8, "WEIGHTED": True}
        yield Variant(architecture, kernel, model, tiers, note, constants, {"num_warps": tile.warps}, note == "fp16")


def _grouped(architecture: int, model: str, tiers: str, tiles: Tiles) -> Iterator[Variant]:
    hidden, intermediate = SHAPES[model]
    for kernel, candidates, rows, columns in (
        ("grouped_gate_up", tiles.grouped_gate_up, intermediate, hidden),
        ("grouped_linear", tiles.grouped_linear, hidden, intermediate),
    ):
        for tile in candidates:
            constants = {
                "ROWS": rows, "COLUMNS": columns, "GROUP": GROUP, "TIERS": TIERS[tiers], "BIAS": False,
                "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": min(tile.block_k, GROUP),
            }  # fmt: skip
            if kernel == "grouped_gate_up":
                constants["ACTIVATION"] = 0
            else:
                constants |= {"PROJECTION": 2, "GATHER": False, "SCATTER": True}
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            yield Variant(architecture, kernel, model, tiers, f"m {tile.block_m}", constants, options)


def compile_variant(variant: Variant) -> Report:
    """Compile one variant to machine code and read it.

    Raises:
        Exception: whatever Triton's compiler says.
    """
    kernel = KERNELS[variant.kernel]
    activations = "*fp16" if variant.float16 else "*bf16"
    names = [name for name in kernel.arg_names if name not in variant.constants]
    signature = {name: _TYPES.get(name, activations) for name in names} | dict.fromkeys(variant.constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    # What launches find too: allocations begin on 16 bytes, descriptions anywhere.
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names if name not in DESCRIPTIONS}
    source = ASTSource(kernel, signature, constexprs=variant.constants, attrs=aligned)
    options = {**variant.options, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", variant.architecture, 32), options=options)
    registers, spills, code = _read_cubin(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    tensor_cores = next((n for n in ("tcgen05.mma", "wgmma.mma_async", "mma.sync") if n in ptx), "")
    loop = _longest_loop(code)
    barriers = sum(1 for line in loop if line.startswith("BAR"))
    return Report(registers, spills, compiled.metadata.shared, tensor_cores.split(".")[0], barriers, len(loop))


def _read_cubin(cubin: bytes) -> tuple[int, int, list[str]]:
    """Registers, bytes of local memory, and the machine code's lines, from the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    # Local memory is spilled registers: the kernels have no arrays.
    spills = sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    return registers, spills, code.splitlines()


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(_TOOLS / name), *arguments], check=True, capture_output=True, text=True).stdout


def _longest_loop(code: list[str]) -> list[str]:
    """Instructions of the longest loop that contains no other."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in code:
        if label := re.match(r"^(\.L_\S+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?);", line):
            instructions.append(found[1].strip())
            target = re.search(r"BRA\S*\s.*?`\((\.L_\S+)\)", found[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    inner = [loop for loop in loops if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]
    first, last = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    return instructions[first:last]


def source_hash() -> str:
    """16 hex digits of the kernels' source and tiles: with Triton's version, what machine code depends on."""
    folder = Path(gate_up_kernel.fn.__code__.co_filename).parent
    digest = hashlib.sha256()
    for name in ("activation", "decode", "fetch", "grouped", "rows", "section"):
        digest.update(_code(folder / f"{name}.py").encode())
    digest.update((folder / "tiles.json").read_bytes())
    digest.update(_code(folder / "tiles.py").encode())
    return digest.hexdigest()[:16]


def _code(path: Path) -> str:
    """A module without comments and docstrings, which change no machine code."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
