"""Lazy reading of checkpoint folders: safetensors shards, or seeded random weights of the same form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import attrs
import msgspec
import torch
import xxhash
from safetensors import SafetensorError

from crossdock.errors import CheckpointError
from crossdock.safetensors_file import SafetensorsFile
from crossdock.types.model import Checkpoint, TensorSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_CPU = torch.device("cpu")


def open_checkpoint(
    folder: Path,
    load_format: str,
    tensors: Mapping[str, TensorSpec],
    dtype_name: str = "F32",
    seed: int = 0,
    device: torch.device = _CPU,
) -> Checkpoint:
    """The tensors of a checkpoint.

    Args:
        folder: where ``config.json`` and the shards lie.
        load_format: ``auto`` reads the shards, ``random`` makes seeded weights and reads none.
        tensors: ``ModelInfo.tensors``; what ``random`` makes.
        dtype_name: of random weights, as safetensors spells it.
        seed: of random weights.
        device: where random weights are made.

    Raises:
        CheckpointError: shards are missing or damaged (all of them are named), or the load format is unknown.
    """
    if load_format == "random":
        return RandomCheckpoint(tensors, dtype_name, seed, device)
    if load_format == "auto":
        return SafetensorsCheckpoint(folder)
    raise CheckpointError(f"load_format {load_format!r} is not known; use 'auto' or 'random'")


class SafetensorsCheckpoint:
    """One file, or the shards that an index names. Headers are read at construction, tensors when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        self._unread: dict[str, None] = {}
        problems: list[str] = []
        for path, expected in _shards(folder).items():
            self._open(path, expected, problems)
        if problems:
            raise CheckpointError(f"checkpoint {str(folder)!r} cannot be read: " + "; ".join(problems))

    def _open(self, path: Path, expected: frozenset[str], problems: list[str]) -> None:
        """Adds a shard's tensors, or what is wrong with the shard."""
        try:
            file = SafetensorsFile(path)
        except FileNotFoundError:
            problems.append(f"shard {path.name} is missing")
            return
        except (OSError, SafetensorError) as error:
            problems.append(f"shard {path.name} is damaged or cut short ({error})")
            return
        found = frozenset(file.tensors)
        problems += [
            f"shard {path.name} does not hold {name}, which the index places there" for name in sorted(expected - found)
        ]
        problems += [f"{name} is in two shards" for name in sorted(found & self._files.keys())]
        self._files.update(dict.fromkeys(found, file))
        self._unread.update(dict.fromkeys(found))

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).tensors[name].shape

    def dtype_name(self, name: str) -> str:
        return self._file(name).tensors[name].dtype

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        file = self._file(name)
        self._unread.pop(name, None)
        return file.read(name, index)

    def unused(self) -> tuple[str, ...]:
        return tuple(self._unread)

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return file


@attrs.frozen(kw_only=True)
class _ShardIndex:
    """The part of the index that is read."""

    weight_map: dict[str, str]
    """Tensor name -> file name."""


def _shards(folder: Path) -> dict[Path, frozenset[str]]:
    """Shard files and the names that the index promises in each."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(
                f"checkpoint folder {str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read"
            )
        return {folder / SINGLE_FILE: frozenset()}
    try:
        index = msgspec.json.decode(index_path.read_bytes(), type=_ShardIndex)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{str(index_path)!r} is no safetensors index with a weight_map: {error}") from error
    names_of: dict[Path, set[str]] = {}
    for name, file in index.weight_map.items():
        names_of.setdefault(folder / file, set()).add(name)
    return {path: frozenset(names) for path, names in sorted(names_of.items())}


class RandomCheckpoint:
    """Seeded random weights with the names and shapes of a model; equal for equal seed, name and kind of device, on every rank and in any order.

    Tensors are made and returned on ``device``: a large model is there in seconds when that is a GPU.

    Matrices have unit gain, router rows twice that (so that the best experts are well apart), norm weights lie around one.
    """

    FP8_SPREAD = 64.0
    """Standard deviation of stored float8 values; the block scales take it out again."""
    DTYPES: ClassVar[dict[str, torch.dtype]] = {"F32": torch.float32, "BF16": torch.bfloat16}

    def __init__(
        self, tensors: Mapping[str, TensorSpec], dtype_name: str, seed: int, device: torch.device = _CPU
    ) -> None:
        if dtype_name not in self.DTYPES:
            raise CheckpointError(f"random weights of dtype {dtype_name} are not made; use {', '.join(self.DTYPES)}")
        self._dtype_name = dtype_name
        self._seed = seed
        self._device = device
        self._specs = dict(tensors)
        for name, spec in tensors.items():
            if spec.fp8_block:
                self._specs[f"{name}_scale_inv"] = TensorSpec(shape=tuple(-(-size // 128) for size in spec.shape))
        self._unread = dict.fromkeys(self._specs)

    def names(self) -> Iterable[str]:
        return self._specs.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._spec(name).shape

    def dtype_name(self, name: str) -> str:
        if self._spec(name).fp8_block:
            return "F8_E4M3"
        return "F32" if name.endswith("_scale_inv") else self._dtype_name

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        spec = self._spec(name)
        self._unread.pop(name, None)
        if name.endswith("_scale_inv"):
            gain = self._specs[name.removesuffix("_scale_inv")].shape[-1] ** -0.5
            return torch.full(spec.shape, gain / self.FP8_SPREAD, device=self._device)[index]
        generator = torch.Generator(self._device)
        generator.manual_seed(xxhash.xxh64_intdigest(name.encode(), self._seed) >> 1)
        values = torch.randn(spec.shape, generator=generator, device=self._device)
        if spec.fp8_block:
            return (values * self.FP8_SPREAD).clamp_(-448, 448)[index].to(torch.float8_e4m3fn)
        mean, deviation = _moments(name.split("."), spec.shape)
        return values.mul_(deviation).add_(mean)[index].to(self.DTYPES[self._dtype_name])

    def unused(self) -> tuple[str, ...]:
        return tuple(self._unread)

    def _spec(self, name: str) -> TensorSpec:
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return spec


def _moments(parts: list[str], shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a random tensor, by the role that its name tells."""
    owner = parts[-2] if len(parts) > 1 else ""
    if "norm" in owner:
        return 1.0, 0.1
    if parts[-1].endswith("bias"):
        return 0.0, 0.05
    if owner == "embed_tokens":
        return 0.0, 1.0
    gain = shape[-1] ** -0.5 if shape else 1.0
    return 0.0, 2 * gain if owner in ("gate", "router") else gain
