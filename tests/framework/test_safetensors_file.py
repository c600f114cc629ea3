"""Tensors read by slices equal the library's, and nothing of the file stays in memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from crossdock.errors import CheckpointError
from crossdock.safetensors_file import SafetensorsFile
from safetensors import SafetensorError
from safetensors.torch import save_file


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 10, generator=generator)
    tensors = {
        "matrix": matrix,
        "halves": matrix.bfloat16(),
        "bytes": (matrix * 8).to(torch.float8_e4m3fn),
        "cube": torch.randint(-9, 9, (3, 4, 5), generator=generator),
        "flags": matrix > 0,
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors", tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def test_whole_tensors_of_every_type_come_back(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file = SafetensorsFile(stored[0])
    assert file.tensors.keys() == stored[1].keys()
    for name, wanted in stored[1].items():
        found = file.read(name)
        assert found.dtype is wanted.dtype
        assert found.shape == wanted.shape == torch.Size(file.tensors[name].shape)
        assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize(
    "index",
    [
        (slice(2, 5),),
        (slice(None), slice(3, 7)),
        (slice(1, 4), slice(0, 2)),
        (slice(4, 4),),
        (slice(4, 99), slice(9, 99)),
        (slice(-2, None),),
        (slice(0, 6, 2),),
    ],
)
def test_slices_equal_the_tensors(stored: tuple[Path, dict[str, torch.Tensor]], index: tuple[slice, ...]) -> None:
    file = SafetensorsFile(stored[0])
    for name in ("matrix", "halves"):
        found = file.read(name, index)
        assert torch.equal(found, stored[1][name][index])
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size(), "the rest is kept in memory"


def test_a_file_cut_while_it_is_open_is_an_error(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file = SafetensorsFile(stored[0])
    with stored[0].open("r+b") as opened:
        opened.truncate(stored[0].stat().st_size - 8)
    last = max(file.tensors, key=lambda name: file.tensors[name].data_offsets[1])
    with pytest.raises(CheckpointError, match=re.escape("model.safetensors ended inside")):
        file.read(last)


def test_a_damaged_header_is_the_librarys_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10" + bytes(40))
    with pytest.raises(SafetensorError):
        SafetensorsFile(path)


def test_a_missing_file_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SafetensorsFile(tmp_path / "absent.safetensors")


def test_reading_maps_nothing(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file = SafetensorsFile(stored[0])
    kept = [file.read(name) for name in file.tensors]
    assert str(stored[0]) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert len(kept) == len(stored[1])
