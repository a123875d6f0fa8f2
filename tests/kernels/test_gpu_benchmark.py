"""The parts of benchmarks/gpu that need no GPU, and its messages without one."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.kernels.on_the_host import OnTheHost
from tests.support.benchmarks import modules_of
from vllm_dymoe.kernels.triton.tiles import TABLE as TILES
from vllm_dymoe.kernels.triton.tiles import choose_tiles

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def gpu_folder():
    with modules_of("gpu"):
        yield


@pytest.fixture(scope="module")
def layers(gpu_folder):
    import layers

    return layers


@pytest.fixture(scope="module")
def compile_table(gpu_folder):
    import compile_table

    return compile_table


@pytest.fixture(scope="module")
def variants(gpu_folder):
    import variants

    return variants


def test_work_and_bound(layers):
    layer = layers.Model(64, 128, 4, 2)
    work = layers.work_of(layer, [[0, 1], [1, 3]], (4, 2))
    four, two = (layer.format(bits).nbytes for bits in (4, 2))
    assert work.weight_bytes == four + 2 * two  # expert 0 has 4 bits; 1 and 3 have 2
    assert work.flops == 4 * 3 * 2 * 64 * 128
    # x read twice; for each of four pairs, h written and read, and an output: two bytes per element.
    assert work.other_bytes == 2 * (2 * 64) + 4 * (2 * 128 * 2 + 2 * 64)
    slow_memory = layers.Machine("", 1e6, 1e15, 1.0)
    slow_units = layers.Machine("", 1e15, 1e6, 1.0)
    assert work.seconds(slow_memory) == pytest.approx((work.weight_bytes + work.other_bytes) / 1e6)
    assert work.seconds(slow_units) == pytest.approx(work.flops / 1e6)


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_fetched_experts_are_launched_at_their_true_sizes(gpu_folder, layers, monkeypatch, architecture):
    """Launches do nothing here; wrappers refuse the same arguments as on a card."""
    import kernel_speeds

    launched = []
    for name in ("decode_gate_up", "decode_down"):
        function = partial(getattr(kernel_speeds, name), start=lambda *arguments: launched.append(arguments))
        monkeypatch.setattr(kernel_speeds, name, function)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(architecture, 10))
    with OnTheHost():
        for layer in layers.LAYERS:
            kernel_speeds.fetching_step(layer)()
    assert len(launched) == 2 * len(layers.LAYERS)


def test_tiles_of_every_architecture_are_readable():
    table = json.loads(TILES.read_text())
    assert {80, 86, 89, 90, 100, 120} <= {int(name) for name in table}
    for name, entry in table.items():
        for shape in ["64x64", *entry["shapes"]]:
            hidden, intermediate = map(int, shape.split("x"))
            tiles = choose_tiles(int(name), hidden, intermediate)
            assert [tile.block_m for tile in tiles.grouped_gate_up] == [tile.block_m for tile in tiles.grouped_down]
            assert all(tile.warps in (4, 8) for tile in (tiles.gate_up, tiles.down))
    assert choose_tiles(103, 64, 64) == choose_tiles(100, 64, 64)
    assert choose_tiles(75, 64, 64) == choose_tiles(80, 64, 64)


def test_the_table_of_the_compiler_is_up_to_date(compile_table, variants):
    rows = compile_table.known_rows()
    assert compile_table.fresh(rows, variants.all_variants()) == rows, "kernels or tiles changed: make kernels-table"
    keys = [compile_table.key(row) for row in rows]
    assert len(set(keys)) == len(keys)
    assert [sentence for row in rows for sentence in compile_table.problems(row)] == []
    planned = [variant.key for variant in variants.all_variants()]
    assert {(triton, *key) for triton in compile_table.TRITONS for key in planned} == set(keys), "make kernels-table"


def test_a_row_of_another_source_or_tile_is_stale(compile_table, variants, monkeypatch):
    def planned():
        return list(variants.variants(86))

    rows = [
        dict(zip(compile_table.COLUMNS, ("3.6.0", *variant.key), strict=True)) | {"digest": variant.digest, "flow": ""}
        for variant in planned()
    ]
    assert compile_table.fresh(rows, planned()) == rows
    assert compile_table.fresh([row | {"note": "of no plan"} for row in rows], planned()) == []
    tile = choose_tiles(86, 2048, 768).gate_up
    monkeypatch.setattr(variants, "choose_tiles", lambda *sizes: replace(choose_tiles(*sizes), down=tile))
    gone = [row for row in rows if row not in compile_table.fresh(rows, planned())]
    assert {row["kernel"] for row in gone} == {"down", "mma_down"}
    monkeypatch.undo()
    source = variants._code
    monkeypatch.setattr(variants, "_code", lambda module: source(module) + ("\npass" if module == "rows" else ""))
    kept = compile_table.fresh(rows, planned())
    others = {"combine", "choose", "decide", "copy_spans", "count", "list", "place_pairs"}
    others |= {"count_uses", "post", "wait", "collect", "ask", "take_sources", "rotate", "popularity"}
    others |= {"name_experts", "judge_predicted", "list_predicted", "copy_predicted"}
    grouped = {"grouped_gate_up", "grouped_down", "mma_grouped_gate_up", "mma_grouped_down"}
    assert {row["kernel"] for row in kept} == grouped | others


def test_only_what_is_compiled_makes_a_row_stale(variants):
    source = """
import os
from elsewhere import helper, other

SIZE = 4
HOST_SIZE = 8

def launch(x):
    return os.cpu_count() * HOST_SIZE

@triton.constexpr_function
def size():
    return SIZE

@triton.jit
def kernel(x):
    '''Docstring.'''
    return helper(x) + size()
"""
    before = variants._compiled_part(source)
    for old, new in (
        ("cpu_count() *", "cpu_count() +"),
        ("HOST_SIZE = 8", "HOST_SIZE = 9"),
        (", other", ""),
        ("Doc", "D"),
    ):
        assert old in source
        assert variants._compiled_part(source.replace(old, new)) == before
    for old, new in (
        ("\nSIZE = 4", "\nSIZE = 5"),
        ("return SIZE", "return -SIZE"),
        ("helper(x) +", "helper(x) -"),
        ("elsewhere", "here"),
    ):
        assert old in source
        assert variants._compiled_part(source.replace(old, new)) != before


def test_problems_are_found(compile_table):
    good = {
        "triton": "3.8.0", "architecture": 120, "kernel": "down", "shape": "64x64", "precisions": "4", "note": "",
        "registers": 1, "spill_bytes": 0, "shared_bytes": 99 * 1024, "tensor_cores": "", "barriers_in_loops": 0,
        "instructions": 1,
    }  # fmt: skip
    assert compile_table.problems(good) == []
    assert "spills 8 bytes" in compile_table.problems(good | {"spill_bytes": 8})[0]
    compared = good | {"architecture": compile_table.MAIN, "note": "device", "flow": "a a a a"}
    assert compile_table.problems(compared) == []
    assert "when it fetches" in compile_table.problems(compared | {"flow": "b b a a"})[0]
    assert "with another one" in compile_table.problems(compared | {"flow": "a b a b"})[0]
    assert len(compile_table.problems(compared | {"flow": "a b a a"})) == 2
    assert compile_table.problems(good | {"spill_bytes": 64, "note": "device"}) == []
    assert "spills 65 bytes" in compile_table.problems(good | {"spill_bytes": 65, "note": "device"})[0]
    assert "shared memory" in compile_table.problems(good | {"shared_bytes": 99 * 1024 + 1})[0]
    assert "exchanges data" in compile_table.problems(good | {"barriers_in_loops": 1})[0]
    assert compile_table.problems(good | {"triton": "3.6.0", "barriers_in_loops": 6}) == []
    assert "exchanges data" in compile_table.problems(good | {"triton": "3.6.0", "barriers_in_loops": 7})[0]
    mma = good | {"kernel": "mma_down", "note": "device, 8 tokens", "tensor_cores": "mma", "instructions": 310}
    assert compile_table.problems(mma) == []
    for change, said in (
        ({"instructions": 311}, "311 instructions"), ({"barriers_in_loops": 1}, "exchanges data"),
        ({"tensor_cores": ""}, "no tensor-core instructions"), ({"spill_bytes": 25}, "spills 25 bytes"),
        ({"early": 2}, "memory 2 times before it waits"),
    ):  # fmt: skip
        assert said in compile_table.problems(mma | change)[0]
    assert compile_table.problems(mma | {"note": "device, 16 tokens", "instructions": 395}) == []
    grouped = good | {"kernel": "grouped_down", "spill_bytes": 8, "barriers_in_loops": 2}
    assert "no tensor-core" in compile_table.problems(grouped)[0]
    assert compile_table.problems(grouped | {"tensor_cores": "mma"}) == []
    in_registers = mma | {"kernel": "mma_grouped_down", "note": "m 64", "barriers_in_loops": 2, "instructions": 630}
    assert compile_table.problems(in_registers) == []
    for change in ({"instructions": 631}, {"barriers_in_loops": 3}, {"tensor_cores": ""}, {"spill_bytes": 1}):
        assert len(compile_table.problems(in_registers | change)) == 1


@pytest.mark.parametrize(
    ("architecture", "kernel", "precisions", "note"),
    [(90, "gate_up", "4", ""), (90, "down", "16", ""), (90, "grouped_down", "4", "m 128"),
     (90, "grouped_gate_up", "2", "m 128")],
)  # fmt: skip
def test_some_variants_compile_as_the_table_says(compile_table, variants, architecture, kernel, precisions, note):
    wanted = (architecture, kernel, "2048x768", precisions, note)
    (variant,) = (variant for variant in variants.variants(architecture) if variant.key == wanted)
    row = compile_table.compile_row(variant)
    assert compile_table.problems(row) == []


def test_a_kernel_that_fetches_and_a_token_beside_another_have_the_same_expressions(variants):
    """The test notices a single product that is rounded differently."""
    import flow
    import machine_code

    (variant,) = (v for v in variants.variants(90) if v.key == (90, "down", "2048x768", "mxfp4", "device"))
    codes = {fetch: machine_code.compiled_ptx(replace(variant, constants=variant.constants | {"FETCH": fetch}))
             for fetch in (False, True)}  # fmt: skip

    def found():
        return flow.digests(variant, lambda v: codes[v.constants["FETCH"]]).split()

    (right,) = set(found())
    parts = codes[True].split("fma.rn.f32")
    codes[True] = "fma.rz.f32".join("fma.rn.f32".join(some) for some in (parts[:20], parts[20:]))
    fetching, plain = set(found()[:2]), set(found()[2:])
    assert plain == {right} != fetching
    codes[True] = codes[False] + "mul.f32 %r8, %r1, %r2;\nadd.f32 %r9, %r3, %r8;\n"
    with pytest.raises(ValueError, match=r"add\.f32 %r9"):
        found()
    # Packed pairs, as sm_120 has them: a product with 2 is exact, so it does not matter whether it is rounded.
    for factor, left in (("0f3F800001", True), ("0f40000000", False)):
        product = f"mul.f32x2 %rd1, {factor}, 0f3F800001;\nadd.f32x2 %rd2, %rd1, 0f3F800000;\nret;"
        codes[True] = product.join(codes[False].rsplit("ret;", 1))
        with pytest.raises(ValueError, match="ptxas may choose") if left else nullcontext():
            assert found()[0] == right


@pytest.mark.parametrize("bits", [16, 4, 32, 256], ids=["16 bits", "4 bits", "MXFP4", "E8"])
def test_what_the_compiler_makes_of_a_decode_step_computes_what_it_should(gpu_folder, bits):
    """Compiled code once treated gates as constants, so that decoded values were zero.

    The interpreter cannot find this.
    """
    from launched import plain_launches, wrong_numbers

    assert wrong_numbers(some for some in plain_launches() if some[1].encoding.tag == bits) == []


@pytest.mark.parametrize("kernel", ["decide", "post", "take_sources"])
def test_a_launch_that_another_one_overlaps_lets_it_begin(variants, kernel):
    from machine_code import compiled_ptx

    counts = []
    for architecture in (80, 90):
        ptx = compiled_ptx(next(one for one in variants.variants(architecture) if one.kernel == kernel))
        counts.append([ptx.count(f"griddepcontrol.{name}") for name in ("launch_dependents", "wait")])
    assert counts == [[0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("kernel", "needs", "never"),
    [
        ("post", "st.release.sys", "atom"),  # an exchange would read over PCIe
        ("wait", "ld.acquire.sys", "ld.volatile"),  # later launches read what was written before the answer
        ("collect", "ld.volatile", ".cv"),  # Triton 3.6.0 and 3.7.1 drop it
        ("copy_predicted", "ld.volatile", ".cv"),
    ],
)
def test_what_two_processors_share_is_read_and_written_as_such(compile_table, variants, kernel, needs, never):
    from machine_code import compiled_ptx

    ptx = compiled_ptx(next(one for one in variants.variants(90) if one.kernel == kernel))
    assert needs in ptx
    assert never not in ptx
