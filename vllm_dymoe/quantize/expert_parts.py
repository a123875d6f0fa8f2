"""Whether a checkpoint's experts are what its configuration says, by the headers of its files alone."""

from collections.abc import Iterable
from pathlib import Path

from vllm_dymoe.quantize.readers import Reader
from vllm_dymoe.quantize.tensor_names import ExpertName, read_name
from vllm_dymoe.quantize.tensors import CheckpointError
from vllm_dymoe.store.header import TensorPlace


def check_expert_parts(folder: Path, tensors: Iterable[TensorPlace], reader: Reader, layers: int) -> None:
    """Refuse experts of another format than the configuration's, and experts of which only some tensors are there.

    Args:
        reader: of the format that config.json names.
        layers: of the model; those behind, of multi-token prediction, may be quantized otherwise.

    Raises:
        CheckpointError: there are such experts.
    """
    matrices: dict[ExpertName, dict[str, str]] = {}
    for place in tensors:
        named = read_name(place.name)
        if named is None or not named.projections or named.layer >= layers or "mtp" in place.name.split("."):
            continue
        part = reader.spellings.get(named.part, named.part)
        if part == "bias":
            continue
        _check_part(folder, place, part, reader)
        matrix = ExpertName(named.layers, named.layer, named.expert, named.projections, "")
        matrices.setdefault(matrix, {})[part] = place.name
    for parts in matrices.values():
        if missing := [part for part in reader.parts if part not in parts]:
            there = next(iter(parts.values()))
            raise CheckpointError(
                f"{folder} has {there} without {' and '.join(missing)}, which {reader.method} has beside it; the "
                "checkpoint is damaged or half converted: download it again."
            )


def _check_part(folder: Path, place: TensorPlace, part: str, reader: Reader) -> None:
    """One tensor by name and dtype; shapes are the reader's to check."""
    dtypes = {reader.parts[0]: reader.code_dtypes, reader.parts[1]: reader.scale_dtypes}.get(part, ())
    if part in reader.known_parts and (not dtypes or place.dtype in dtypes):
        return
    expected = f"{part} of {' or '.join(dtypes)}" if dtypes else " and ".join(reader.known_parts)
    raise CheckpointError(
        f"{place.name} ({place.dtype}) in {folder} is not what config.json says: {reader.method} has {expected} there; "
        "download the checkpoint again, or correct its quantization_config."
    )
