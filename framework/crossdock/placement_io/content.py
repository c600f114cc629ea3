"""Raw content of a file or an inline JSON text, whatever the format; all failures are ``LoadFileError``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

import attrs
import numpy as np
import numpy.typing as npt

from crossdock.errors import LoadFileError

_TORCH_SUFFIXES = (".pt", ".pth")
SUFFIXES = (*_TORCH_SUFFIXES, ".json", ".jsonl", ".npz", ".npy")


@attrs.frozen(kw_only=True, eq=False)
class Content:
    """What was read. ``value`` is a mapping, a list or an array."""

    where: str
    """Path, or ``inline JSON``, for messages."""
    value: Any

    @property
    def mapping(self) -> Mapping[str, Any] | None:
        """The value when it is a mapping."""
        return self.value if _is_mapping(self.value) else None

    @property
    def records(self) -> list[Mapping[str, Any]] | None:
        """The value when it is a list of mappings, not an empty one."""
        return self.value if _are_records(self.value) else None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a mapping, none of anything else."""
        return tuple(str(key) for key in self.mapping or ())

    def array(self, key: str, *, dims: Sequence[int], integer: bool) -> npt.NDArray[Any]:
        """The array under ``key`` with one of so many dimensions; int64 or float64."""
        return as_array(self.value[key], where=f"{self.where}: {key}", dims=dims, integer=integer)

    def fail(self, message: str) -> LoadFileError:
        """The error to raise about this content."""
        return LoadFileError(f"{self.where}: {message}")


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _are_records(value: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and value != [] and all(map(_is_mapping, cast("list[object]", value)))


def read_content(source: str | Path) -> Content:
    """The content of a ``.pt``, ``.json``, ``.jsonl``, ``.npz`` or ``.npy`` file, or of an inline JSON text (``{`` or ``[``)."""
    text = str(source).strip()
    if text.startswith(("{", "[")):
        return Content(where="inline JSON", value=_json(text, "inline JSON"))
    path = Path(source)
    if not _is_file(path):
        raise LoadFileError(
            f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; give one of {', '.join(SUFFIXES)}"
        )
    suffix = path.suffix.lower()
    try:
        if suffix in _TORCH_SUFFIXES:
            return Content(where=str(path), value=_torch_content(path))
        if suffix == ".json":
            return Content(where=str(path), value=_json(path.read_text(encoding="utf-8"), str(path)))
        if suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
            return Content(where=str(path), value=[_json(line, f"{path}, line {number}") for number, line in numbered])
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return Content(where=str(path), value={name: archive[name] for name in archive.files})
        if suffix == ".npy":
            return Content(where=str(path), value=np.load(path, allow_pickle=False))
    except LoadFileError:
        raise
    except Exception as error:
        raise LoadFileError(f"{path}: cannot be read as {suffix} ({type(error).__name__}: {error})") from error
    raise LoadFileError(f"{path}: unknown suffix {suffix or '(none)'}; give one of {', '.join(SUFFIXES)}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise LoadFileError(
            f"{str(path)[:80]}: {error.strerror or error}; give one of {', '.join(SUFFIXES)}"
        ) from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise LoadFileError(f"{where}: not JSON ({error})") from error
    except RecursionError:
        raise LoadFileError(f"{where}: nested too deep") from None


def _torch_content(path: Path) -> Any:
    """Tensors and plain containers only: nothing in the file is executed."""
    import torch

    with warnings.catch_warnings():
        # The error that follows says more than torch's guess of what may be wrong.
        warnings.simplefilter("ignore")
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    return loaded


def _host_values(tensor: Any, where: str) -> npt.NDArray[Any]:
    """A tensor's values; in double precision where it has fractions, since numpy lacks some of torch's types."""
    try:
        tensor = tensor.detach().cpu().to_dense() if tensor.is_sparse else tensor.detach().cpu()
        values: npt.NDArray[Any] = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    except Exception as error:
        raise LoadFileError(f"{where}: a tensor without plain values ({type(error).__name__}: {error})") from error
    return values


def as_array(value: object, *, where: str, dims: Sequence[int], integer: bool) -> npt.NDArray[Any]:
    """``value`` (nested lists, array or tensor) as int64 or float64 with one of so many dimensions."""
    if hasattr(value, "detach"):
        value = _host_values(value, where)
    try:
        array: npt.NDArray[Any] = np.array(value)
    except ValueError as error:
        raise LoadFileError(f"{where}: rows have different lengths") from error
    wanted = " or ".join(f"{n}" for n in dims)
    if array.ndim not in dims or array.dtype.kind not in ("iu" if integer else "iuf"):
        kind = "integers" if integer else "numbers"
        raise LoadFileError(
            f"{where}: expected {kind} in {wanted} dimensions, found {array.dtype} of shape {list(array.shape)}"
        )
    return array.astype(np.int64 if integer else np.float64)
