"""Compiles a variant ahead of time and reads its machine code, without a GPU."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from variants import Variant

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Report:
    """Result of compiling one variant."""

    registers: int  # for each thread
    spill_bytes: int  # of each thread's local memory
    shared_bytes: int  # of a program
    tensor_cores: str  # mma, wgmma or tcgen05 if the PTX has such instructions, else ""
    barriers_in_loops: int  # barriers in the longest innermost loop; without any, its threads exchange nothing
    instructions: int  # of that loop; of the longest one with mma instructions if there are such


def compile_variant(variant: Variant) -> Report:
    """Compile one variant to machine code and read it.

    Raises:
        Exception: from Triton's compiler.
    """
    source, target, options = _prepared(variant)
    compiled = triton.compile(source, target=target, options=options)
    registers, spills, code = _read_cubin(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    tensor_cores = next((n for n in ("tcgen05.mma", "wgmma.mma_async", "mma.sync") if n in ptx), "")
    loop = _longest_loop(code)
    barriers = sum(1 for line in loop if line.startswith("BAR"))
    return Report(registers, spills, compiled.metadata.shared, tensor_cores.split(".")[0], barriers, len(loop))


def product_loops(variant: Variant) -> list[tuple[int, int]]:
    """Return mma and all instructions of each innermost loop with products.

    The loops are in ascending order.
    """
    source, target, options = _prepared(variant)
    code = _read_cubin(triton.compile(source, target=target, options=options).asm["cubin"])[2]
    return sorted((sum(line.startswith("HMMA") for line in loop), len(loop)) for loop in _loops_of_products(code))


def accesses_before_waiting(variant: Variant) -> int:
    """Return how often memory is accessed before the wait for the previous launch.

    Instructions are counted in the machine code of a variant that waits at its start, to which the compilers may have
    moved loads.

    Raises:
        ValueError: it does not wait.
    """
    source, target, options = _prepared(variant)
    code = _instructions(_read_cubin(triton.compile(source, target=target, options=options).asm["cubin"])[2])
    if not (waits := [number for number, line in enumerate(code) if line.startswith("ACQBULK")]):
        raise ValueError(f"{variant.key} does not wait for the previous launch")
    return sum(re.match(r"LDG|LD\.|STG|ST\.|ATOM|RED", line) is not None for line in code[: waits[0]])


def compiled_ptx(variant: Variant) -> str:
    """Return the PTX of a variant."""
    source, target, options = _prepared(variant)
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


def fused_instructions(variant: Variant) -> list[str]:
    """Return lines that multiply and add floats with a single rounding.

    They are lines of the PTX and of the machine code. In machine code a division consists of such instructions and
    still rounds correctly. So only the PTX of a variant that divides is read, in which products and sums name their
    rounding.
    """
    source, target, options = _prepared(variant)
    compiled = triton.compile(source, target=target, options=options)
    lines = compiled.asm["ptx"].splitlines()
    if not any("div.rn" in line for line in lines):
        lines += _read_cubin(compiled.asm["cubin"])[2]
    return [line.strip() for line in lines if re.search(r"\bfma\.|\b[FH]FMA", line)]


def _prepared(variant: Variant) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Return the source, the target and the options of a compilation."""
    kernel = variant.code
    signature = {name: variant.types.get(name, "constexpr") for name in kernel.arg_names}
    # The alignment of arguments is that of launches: allocations start at multiples of 16 bytes, descriptions anywhere,
    # and numbers are arbitrary.
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if variant.types.get(parameter.name, "").startswith("*") and not parameter.do_not_specialize_on_alignment
    }
    of_language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = of_language(kernel, signature, constexprs=variant.constants, attrs=aligned)
    options = {"enable_fp_fusion": True, **variant.options}
    return source, GPUTarget("cuda", variant.architecture, 32), options


def _read_cubin(cubin: bytes) -> tuple[int, int, list[str]]:
    """Return registers, bytes of local memory, and lines of machine code.

    They come from the tools that Triton ships.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    # Local memory means spilled registers, because the kernels have no arrays.
    spills = sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    return registers, spills, code.splitlines()


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(_TOOLS / name), *arguments], check=True, capture_output=True, text=True).stdout


def _instructions(code: list[str]) -> list[str]:
    found = (re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?);", line) for line in code)
    return [line[1].strip() for line in found if line]


def _longest_loop(code: list[str]) -> list[str]:
    """Return the instructions of the longest innermost loop.

    If there are innermost loops with mma instructions, it is the longest of those.
    """
    return max(_loops_of_products(code) or _innermost_loops(code), key=len, default=[])


def _loops_of_products(code: list[str]) -> list[list[str]]:
    return [loop for loop in _innermost_loops(code) if any(line.startswith("HMMA") for line in loop)]


def _innermost_loops(code: list[str]) -> list[list[str]]:
    """Return the instructions of each innermost loop."""
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
    return [instructions[first:last] for first, last in inner]
