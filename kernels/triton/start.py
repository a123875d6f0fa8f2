"""Launching a kernel, and repeating launches."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, cast

import triton
from torch import Tensor

Start = Callable[[Any, tuple[int, ...], Sequence[Tensor | int], dict[str, Any], dict[str, int]], None]
"""(kernel, grid, its tensors and numbers, its constants, and what compiler and driver are told: num_warps, and
num_stages, maxnreg, launch_pdl and enable_fp_fusion where they differ from their own choice and True)"""


class Overlap(IntEnum):
    """How a launch overlaps the one before it in the stream.

    This is programmatic dependent launch, from sm_90 on. The earlier launch says in its program from when on the later
    one may begin; everything before it has ended by then. The later one has to wait for its end in every program: a
    launch that ends without waiting would let the next one begin while the earlier one still runs.
    """

    NONE = 0  # it begins when the launch before has ended
    START = 1  # it waits before it accesses anything that the launch before writes
    WHOLE = 2  # it waits when it has done its work: the launch before writes nothing that it accesses

    @property
    def options(self) -> dict[str, int]:
        """Return the option of a launch that overlaps the one before it."""
        return {"launch_pdl": True} if self is not Overlap.NONE else {}


_STREAM = 3  # place of the stream among the arguments of a compiled kernel's launcher, after the grid
_FUSED = {"enable_fp_fusion": True}


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | int],
    constants: dict[str, Any],
    options: dict[str, int],
) -> None:
    """Launch a kernel; compile it first if needed."""
    kernel[grid](*tensors, **constants, **_FUSED | options)


class Given:
    """The arguments that prepared launches get anew in each run.

    They are read once for all launches.

    Args:
        tensors: by name.
        numbers: by the name of the kernels' argument; kernels are not specialized on their values.
        columns: further tensors by name, whose dtype and alignment no kernel depends on.
        addresses: of the columns.

    Attributes:
        kind: a number for the dtypes, alignments and contiguity of the tensors; launches are prepared for one kind.
    """

    __slots__ = ("addresses", "columns", "kind", "numbers", "tensors")
    _kinds: ClassVar[dict[tuple[Any, ...], int]] = {}

    def __init__(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int],
        columns: Mapping[str, Tensor] = MappingProxyType({}), addresses: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.tensors, self.numbers, self.columns = tensors, numbers, columns
        self.addresses: dict[str, int] = {**addresses, **numbers}
        kinds: list[Any] = []
        for name, tensor in tensors.items():
            self.addresses[name] = address = tensor.data_ptr()
            kinds += (tensor.dtype, address % 16 == 0, tensor.is_contiguous())
        self.kind = self._kinds.setdefault(tuple(kinds), len(self._kinds))

    def __getitem__(self, name: str) -> Tensor | int:
        for values in (self.tensors, self.numbers, self.columns):
            if name in values:
                return values[name]
        raise KeyError(name)

    def name_of(self, value: Tensor | int, argument: str) -> str | None:
        """Return the name of a launch's argument if it changes.

        A tensor changes if it begins where one of these does, a number if it is one of these.

        Raises:
            ValueError: the tensor begins elsewhere in the memory of one that changes, or where two of them do.
        """
        if isinstance(value, int):
            return argument if self.numbers.get(argument) == value else None
        changing = {**self.columns, **self.tensors}
        same = [name for name, tensor in self.tensors.items() if tensor.data_ptr() == value.data_ptr() != 0]
        if len(same) > 1:
            raise ValueError(f"{argument} could be {' or '.join(same)}, which begin at the same address")
        for name, tensor in changing.items():
            if tensor.data_ptr() == value.data_ptr():
                return name
        if any(_memory_of(tensor) == _memory_of(value) for tensor in self.tensors.values()):
            raise ValueError(f"{argument} is part of a tensor that changes, but does not begin where that does")
        return None


class PreparedLaunch:
    """A launch that is repeated often with other addresses and numbers.

    From the second time on the driver gets the compiled kernel at once: ``JITFunction.run`` takes 12 to 17 us to bind
    and look at every argument.

    Args:
        tensors: for the first launch. Those that are not ``given``, and their memory, stay where they are.
        given: what the first launch gets. Later runs have others of the same kinds.
        others: see :data:`Start`.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | int], constants: dict[str, Any],
        options: dict[str, int], given: Given,
    ) -> None:  # fmt: skip
        self._kernel, self._tensors, self._constants = kernel, list(tensors), constants
        self._usual = partial(kernel.run, grid=grid, warmup=False, **constants, **_FUSED | options)
        named = (given.name_of(value, name) for value, name in zip(tensors, kernel.arg_names, strict=False))
        self._changing = [(place, name) for place, name in enumerate(named) if name is not None]
        self._grid, self._run = (*grid, 1, 1)[:3], cast("Any", None)
        self._bound: list[Any] = []  # what the compiled kernel's launcher takes
        self._places: list[tuple[int, str]] = []  # of changing arguments among them

    @property
    def compiled(self) -> bool:
        """Whether the driver gets the kernel at once."""
        return self._run is not None

    def first(self, given: Given) -> None:
        """Launch as usual; compile the kernel first if needed."""
        for place, name in self._changing:
            self._tensors[place] = given[name]
        found = self._usual(*self._tensors)
        if hasattr(found, "packed_metadata"):  # there is none in the interpreter
            self._keep(found)

    def again(self, addresses: Mapping[str, int], stream: int) -> None:
        """Launch the compiled kernel on a stream, whose handle is given."""
        bound = self._bound
        bound[_STREAM] = stream
        for place, name in self._places:
            bound[place] = addresses[name]
        self._run(*bound)

    def _keep(self, compiled: Any) -> None:
        fixed = [tensor.data_ptr() if isinstance(tensor, Tensor) else tensor for tensor in self._tensors]
        names = self._kernel.arg_names[len(fixed) :]
        if self._constants.keys() >= set(names):  # others have defaults, which JITFunction.run adds
            # As JITFunction.run ends, in Triton 3.6 to 3.9, without hooks.
            bound = [*self._grid, 0, compiled.function, compiled.packed_metadata, None, None, None]
            self._places = [(len(bound) + place, name) for place, name in self._changing]
            self._bound = bound + fixed + [self._constants[name] for name in names]
            self._run = compiled.run
            for place, _ in self._changing:
                self._tensors[place] = 0  # activations of the first run are not kept alive


class Repeated:
    """Sequences of launches that are prepared once and repeated.

    Arguments change, but not their kinds.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[Hashable, int], list[PreparedLaunch]] = {}
        self._compiled: dict[tuple[Hashable, int], list[PreparedLaunch]] = {}  # those that are compiled

    def run(self, name: Hashable, given: Given, launch: Callable[..., None], *arguments: Any) -> None:
        """Make a sequence's launches on the current stream.

        Args:
            name: of the sequence.
            given: what differs from the last time.
            launch: makes the launches by calling the argument ``start``. It is called once for each name and kind of
                arguments.
            arguments: further arguments of ``launch``.
        """
        key = name, given.kind
        if (compiled := self._compiled.get(key)) is not None:
            stream, addresses = _current_stream(), given.addresses
            for prepared in compiled:
                prepared.again(addresses, stream)
            return
        if (launches := self._prepared.get(key)) is None:
            launches = _noted(partial(launch, *arguments), given)
            self._prepared[key] = launches  # not if the function refused its arguments
        for prepared in launches:
            if prepared.compiled:
                prepared.again(given.addresses, _current_stream())
            else:
                prepared.first(given)
        if all(prepared.compiled for prepared in launches):
            self._compiled[key] = launches


def _noted(launch: Callable[..., None], given: Given) -> list[PreparedLaunch]:
    """Return the launches that a function makes."""
    found: list[PreparedLaunch] = []

    def note(
        kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | int], constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:  # fmt: skip
        found.append(PreparedLaunch(kernel, grid, tensors, constants, options, given))

    launch(start=note)
    return found


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _current_stream() -> int:
    active = triton.runtime.driver.active
    stream: int = active.get_current_stream(active.get_current_device())
    return stream
