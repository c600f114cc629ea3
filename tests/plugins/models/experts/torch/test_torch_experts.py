"""Forms of the torch experts plugin, and that it keeps no copy of the weights."""

from __future__ import annotations

import pytest
import torch
from crossdock.errors import ConfigValueError
from crossdock.native_code import native_code
from crossdock.types.dispatch import Received, ReceiveLayout
from crossdock.types.experts import ExpertsSpec, ExpertTensors
from crossdock_models.experts.torch.experts import TorchExperts
from crossdock_models.experts.torch.options import TorchExpertsOptions

HAS_NATIVE = native_code().library is not None


def make(form: str, hidden: int = 64, inner: int = 32) -> tuple[TorchExperts, ExpertTensors]:
    generator = torch.Generator().manual_seed(0)
    spec = ExpertsSpec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=4,
        top_k=2,
        activation="silu",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tensors = ExpertTensors(
        layer=3,
        tensors={
            "gate_up": torch.randn(4, 2 * inner, hidden, generator=generator),
            "down": torch.randn(4, hidden, inner, generator=generator),
        },
    )
    experts = TorchExperts(TorchExpertsOptions(form=form), spec)  # type: ignore[arg-type]
    experts.attach(tensors)
    return experts, tensors


def sample(hidden: int = 64) -> Received:
    generator = torch.Generator().manual_seed(1)
    return Received(
        layout=ReceiveLayout.TOKEN_ROWS,
        rows=torch.randn(7, hidden, generator=generator),
        local_topk_ids=torch.randint(-1, 4, (7, 2), generator=generator),
        row_weights=torch.rand(7, 2, generator=generator),
    )


def test_auto_takes_the_native_form_where_it_can() -> None:
    assert make("auto")[0].form == ("native" if HAS_NATIVE else "sorted")
    assert make("auto", hidden=24, inner=20)[0].form == "loop"


@pytest.mark.parametrize("form", ["auto", "sorted", "loop"])
def test_forms_agree(form: str) -> None:
    torch.testing.assert_close(make(form)[0].run(3, sample()), make("loop")[0].run(3, sample()), rtol=1e-5, atol=1e-4)


def test_native_is_refused_with_the_reason_where_it_cannot_run() -> None:
    with pytest.raises(ConfigValueError, match="'native' cannot run here: sizes 24 and 20"):
        make("native", hidden=24, inner=20)


def test_weights_are_read_where_they_lie() -> None:
    experts, tensors = make("auto")
    before = experts.run(3, sample())
    tensors.tensors["down"].mul_(2.0)
    torch.testing.assert_close(experts.run(3, sample()), 2.0 * before)
