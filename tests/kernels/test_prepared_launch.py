"""Repeated launches: what the driver receives from the second time on."""

import pytest
import torch

from vllm_dymoe.kernels.triton import start
from vllm_dymoe.kernels.triton.start import Given, Repeated

GRID, CONSTANTS, OPTIONS = (3, 2), {"SIZE": 64, "KIND": "a"}, {"num_warps": 4}
NAMES = "x", "out", "list", "layer", "count", "KIND", "SIZE"
WORK = torch.zeros(8, dtype=torch.int32)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched = []

    def run(self, *arguments):
        self.launched.append(arguments)


class Kernel:
    """A kernel that records usual launches, each of which returns ``found``."""

    def __init__(self, found, arg_names=NAMES):
        self.found, self.arg_names, self.usual = found, arg_names, []

    def run(self, *tensors, grid, warmup, **constants):
        assert (grid, warmup) == (GRID, False)
        assert constants == CONSTANTS | OPTIONS | {"enable_fp_fusion": True}
        self.usual.append(tensors)
        return self.found


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(start, "_current_stream", lambda: 77)


def given(layer=0, dtype=torch.bfloat16, first=0):
    return Given({name: torch.zeros(64, dtype=dtype)[first:] for name in ("x", "out")}, {"layer": layer})


def launch_of(kernel, values, x=None):
    """Return a function that launches the kernel, as Repeated calls it."""
    tensors = values.tensors["x"] if x is None else x, values.tensors["out"]
    return lambda *, start: start(kernel, GRID, (*tensors, WORK, values.numbers["layer"], 5), CONSTANTS, OPTIONS)


def run(repeated, kernel, values, name="a", **others):
    repeated.run(name, values, launch_of(kernel, values, **others))


def test_the_second_launch_gets_addresses_numbers_and_constants_in_the_kernels_order():
    kernel, repeated, first, second = Kernel(Compiled()), Repeated(), given(3), given(4)
    run(repeated, kernel, first)
    assert [*map(id, kernel.usual[0])] == [*map(id, (first.tensors["x"], first.tensors["out"], WORK, 3, 5))]
    run(repeated, kernel, second)
    assert len(kernel.usual) == 1
    addresses = [tensor.data_ptr() for tensor in (*second.tensors.values(), WORK)]
    assert kernel.found.launched == [(3, 2, 1, 77, "function", "metadata", None, None, None, *addresses, 4, 5, "a", 64)]


def test_launches_are_made_anew_for_other_names_and_other_kinds_of_arguments():
    kernel, repeated = Kernel(Compiled()), Repeated()
    transposed = Given({name: torch.zeros(8, 8, dtype=torch.bfloat16).T for name in ("x", "out")}, {"layer": 0})
    for values in (given(), given(first=1), given(dtype=torch.float16), transposed):
        for _ in range(2):
            run(repeated, kernel, values)
    run(repeated, kernel, given(), name="b")
    assert (len(kernel.usual), len(kernel.found.launched)) == (5, 4)


def test_the_first_step_of_a_sequence_is_not_kept_alive():
    kernel, repeated, values = Kernel(Compiled()), Repeated(), given()
    run(repeated, kernel, values)
    prepared = repeated._prepared["a", values.kind][0]
    assert not {id(tensor) for tensor in values.tensors.values()} & {id(tensor) for tensor in prepared._tensors}


def test_a_part_of_a_changing_tensor_must_begin_where_it_begins():
    kernel, repeated, first, second = Kernel(Compiled()), Repeated(), given(), given()
    run(repeated, kernel, first, x=first.tensors["x"][:8])
    run(repeated, kernel, second, x=second.tensors["x"][:8])
    assert kernel.found.launched[0][9] == second.tensors["x"].data_ptr()
    for _ in range(2):
        with pytest.raises(ValueError, match="does not begin where"):
            run(repeated, kernel, first, name="b", x=first.tensors["x"][8:])


def test_columns_change_without_another_kind_of_arguments():
    pool, kernel, repeated = torch.zeros(2, 3, dtype=torch.int64), Kernel(Compiled()), Repeated()
    for layer, row in enumerate(pool):  # the second row begins at an odd multiple of eight
        values = given(layer)
        values = Given(values.tensors, values.numbers, {"pool": row}, {"pool": row.data_ptr()})
        run(repeated, kernel, values, x=row)
    assert len(kernel.usual) == 1
    assert kernel.found.launched[0][9] == pool[1].data_ptr()


@pytest.mark.parametrize(("found", "names"), [(None, NAMES), (Compiled(), (*NAMES[:5], "DEFAULT"))])
def test_without_a_compiled_kernel_or_all_constants_every_launch_is_usual(found, names):
    kernel, repeated = Kernel(found, names), Repeated()
    for layer in range(3):
        run(repeated, kernel, given(layer))
    assert [tensors[3] for tensors in kernel.usual] == [0, 1, 2]
