"""Start-up proves that all ranks hold the same plugins, options and capabilities, by one collective (DESIGN section 4)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from crossdock.errors import AgreementError
from crossdock.plain_value import plain_value
from crossdock.types.selection import Selection

if TYPE_CHECKING:
    import torch

    from crossdock.types.comm import GroupComm

_DIGEST_BYTES: Final = 32
_LENGTH_BYTES: Final = 8
_ABSENT: Final = "absent"


def agreement_fields(selection: Selection) -> dict[str, str]:
    """What must be equal on all ranks, one text a field: ``dispatcher.version``, ``padding.options``, ..."""
    fields = {
        "parallel.sizes": _text(plain_value(selection.sizes)),
        "device": selection.device,
        "dtype": selection.dtype,
        "row_invariant": str(selection.row_invariant),
    }
    for plugin in (*selection.plugins, *selection.observers):
        prefix = plugin.point if plugin.point != "observer" else f"observer.{plugin.name}"
        fields |= {
            f"{prefix}.name": plugin.name,
            f"{prefix}.distribution": plugin.distribution,
            f"{prefix}.version": plugin.version,
            f"{prefix}.hook_api_version": str(plugin.api),
            f"{prefix}.options": _text(plain_value(plugin.options)),
            f"{prefix}.capabilities": _text(plain_value(plugin.capabilities)),
        }
    return fields


def check_agreement(fields: Mapping[str, str], world: GroupComm, device: torch.device) -> None:
    """Returns when every rank called it with equal fields. Every rank of ``world`` must call it.

    One all-gather of a digest; a second one, of the fields themselves, only when digests differ (all ranks see that they do).

    Raises:
        AgreementError: on every rank, with the odd ranks, the first differing field and both values.
    """
    encoded = json.dumps(dict(sorted(fields.items()))).encode()
    header = hashlib.sha256(encoded).digest() + len(encoded).to_bytes(_LENGTH_BYTES, "big")
    headers = _gather(header, world, device)
    if len({gathered[:_DIGEST_BYTES] for gathered in headers}) == 1:
        return
    longest = max(int.from_bytes(gathered[_DIGEST_BYTES:], "big") for gathered in headers)
    texts = _gather(encoded.ljust(longest), world, device)
    tables: list[dict[str, str]] = [json.loads(text) for text in texts]
    raise _difference(tables, world.ranks)


def _gather(data: bytes, world: GroupComm, device: torch.device) -> list[bytes]:
    """The equally long bytes of every member."""
    import torch

    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = world.all_gather(own).cpu().numpy().tobytes()
    return [gathered[start : start + len(data)] for start in range(0, len(gathered), len(data))]


def _difference(tables: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> AgreementError:
    names = sorted({name for table in tables for name in table})
    name = next(name for name in names if len({table.get(name, _ABSENT) for table in tables}) > 1)
    values = [table.get(name, _ABSENT) for table in tables]
    usual = Counter(values).most_common(1)[0][0]
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    odd_value = next(value for value in values if value != usual)
    listed = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    return AgreementError(
        f"ranks do not agree on {name}: {listed} found {odd_value}, the others {usual}; install the same packages and give "
        "the same configuration on every machine",
        odd_ranks=odd,
        field=name,
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
