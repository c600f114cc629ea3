"""What a rank is going to be, from configuration and config.json alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from crossdock.errors import CheckpointError, ConfigValueError, SelectionRefused
from crossdock.rank_plan import BUNDLED_MODEL, compute_dtype, model_folder, plan_rank
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.types.step import DispatchMode


@pytest.mark.parametrize(
    ("configured", "stored", "expected"),
    [
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"torch_dtype": "float32"}, "float32"),
        ("auto", {"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ("auto", {"dtype": "float16"}, "float32"),
        ("auto", {}, "float32"),
        ("bfloat16", {"dtype": "float32"}, "bfloat16"),
    ],
)
def test_auto_takes_the_dtype_of_the_checkpoint_and_a_chosen_one_wins(
    configured: str, stored: dict[str, str], expected: str
) -> None:
    assert compute_dtype(configured, stored) == expected


def test_a_dtype_that_cannot_be_computed_in_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'float64' is none of"):
        compute_dtype("auto", {"dtype": "float64"})


def test_an_empty_path_is_the_bundled_model() -> None:
    assert model_folder("").name == BUNDLED_MODEL
    assert model_folder("/models/x") == Path("/models/x")


@pytest.mark.parametrize(("configured", "expected"), [(0, 512), (100, 100), (9000, 512)])
def test_the_context_is_the_smaller_of_the_models_and_the_configured_one(
    tmp_path: Path, configured: int, expected: int
) -> None:
    config = random_model_config(write_random_model(tmp_path), max_sequence_tokens=configured)
    assert plan_rank(config, 0).max_sequence_tokens == expected


def test_slots_must_divide_over_the_expert_ranks(tmp_path: Path) -> None:
    config = random_model_config(write_random_model(tmp_path), ranks=2, attn_dp=2)
    config = attrs.evolve(config, eplb=attrs.evolve(config.eplb, num_redundant_experts=1))
    with pytest.raises(ConfigValueError, match=r"the smallest that works is eplb\.slots = 10"):
        plan_rank(config, 0)


def test_a_selection_that_cannot_work_together_is_refused_with_its_code(tmp_path: Path) -> None:
    config = random_model_config(write_random_model(tmp_path), ranks=2, moe_ep=1, dispatcher="alltoallv")
    with pytest.raises(SelectionRefused) as refused:
        plan_rank(config, 0)
    assert refused.value.codes == ("a2a_needs_full_ep",)


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    code = (
        "import sys\n"
        "from crossdock.config import CheckpointConfig, Config\n"
        "from crossdock.rank_plan import plan_rank\n"
        f"plan_rank(Config(checkpoint=CheckpointConfig(path={str(folder)!r})), 0)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_rules_of_a_step_follow_from_the_plan(tmp_path: Path) -> None:
    from crossdock.step_rules import step_rules

    rules = step_rules(plan_rank(random_model_config(write_random_model(tmp_path)), 0))
    assert (rules.hidden_size, rules.itemsize) == (48, 4)
    assert not rules.overlap, "one micro-batch has nothing to overlap with"
    assert rules.dispatch_modes == {DispatchMode.NORMAL}
    dense = write_random_model(tmp_path / "dense", mlp_only_layers=[0, 1, 2])
    assert not step_rules(plan_rank(random_model_config(dense), 0)).symmetric_counts_required
