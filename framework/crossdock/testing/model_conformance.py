"""What must hold for a model: the same logits however a prompt is cut and on however many ranks, and an honest list of its tensors.

The suite runs on configs that it knows (``crossdock.testing.tiny_models``), and for another family on ``tiny_config.json`` beside the
plugin's ``plugin.py``, with random weights. ``check_folder`` runs it on the folder of a small checkpoint.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from crossdock.checkpoint import SafetensorsCheckpoint
from crossdock.groups import resolve_sizes
from crossdock.registry import load_plugin
from crossdock.testing.conformance import NotCheckable, PluginCase, check_of
from crossdock.testing.model_driver import ModelDriver, Work, run_on_rank
from crossdock.testing.model_oracle import one_rank_driver, relative_error
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.random_checkpoint import write_random_checkpoint
from crossdock.testing.tiny_models import FAMILIES, tiny_config
from crossdock.testing.world import RankPool

TOLERANCE = 1e-5
"""Of float32 logits against the same model in one go on one rank, relative to the largest: sums are taken in another order."""
LENGTH = 13
OWN_CONFIG = "tiny_config.json"


def _prompt(driver: ModelDriver) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(driver.info.vocab_size, (LENGTH,), generator=generator).tolist()


def check_chunks_and_single_tokens_equal_one_go(folder: Path, pool_of: Callable[[int], RankPool]) -> None:
    driver = one_rank_driver(DriverChoice(folder=str(folder)))
    ids = _prompt(driver)
    whole = driver.step([{0: ids}])[0]
    cut = [driver.step([{1: ids[start:stop]}])[1] for start, stop in ((0, 5), (5, 6), (6, LENGTH))]
    single = [driver.step([{2: [token]}])[2] for token in ids]
    for name, parts in (("chunks", cut), ("tokens", single)):
        error = relative_error(torch.cat(parts), whole)
        assert error < TOLERANCE, f"{name} differ from one go by {error}"


def check_sequences_of_one_batch_do_not_touch_one_another(folder: Path, pool_of: Callable[[int], RankPool]) -> None:
    driver = one_rank_driver(DriverChoice(folder=str(folder)))
    ids = _prompt(driver)
    alone = driver.step([{0: ids}])[0]
    driver.step([{1: ids[:6], 2: ids[:4]}])
    together = driver.step([{2: ids[4:], 3: ids, 1: ids[6:7]}])
    for sequence, wanted in ((2, alone[4:]), (3, alone), (1, alone[6:7])):
        error = relative_error(together[sequence], wanted)
        assert error < TOLERANCE, f"sequence {sequence} differs from the same alone by {error}"


def check_a_step_without_rows_runs_through(folder: Path, pool_of: Callable[[int], RankPool]) -> None:
    assert one_rank_driver(DriverChoice(folder=str(folder))).step([{}]) == {}


def check_two_ranks_equal_one(folder: Path, pool_of: Callable[[int], RankPool]) -> None:
    """Attention DP 2 with one replica idle in turn, and attention TP 2; experts over both ranks."""
    driver = one_rank_driver(DriverChoice(folder=str(folder)))
    ids = _prompt(driver)
    whole = driver.step([{0: ids}])[0]
    for attn_dp in (2, 1):
        sizes = resolve_sizes(ranks=2, attn_dp_size=attn_dp)
        first: list[Work] = [{0: ids[:7]}, *[{}] * (attn_dp - 1)]
        second: list[Work] = [*[{}] * (attn_dp - 1), {1: ids}]
        third: list[Work] = [{0: ids[7:]}, *[{}] * (attn_dp - 1)]
        choice = DriverChoice(folder=str(folder))
        results = pool_of(2).run(run_on_rank, choice, sizes, [first, second, third])
        for rank, steps in enumerate(results):
            for sequence in {key for step in steps for key in step}:
                found = torch.cat([step[sequence] for step in steps if sequence in step])
                error = relative_error(found, whole)
                assert error < TOLERANCE, f"attn_dp {attn_dp}, rank {rank}: logits differ from one rank's by {error}"


def check_every_listed_tensor_is_read_and_no_other(folder: Path, pool_of: Callable[[int], RankPool]) -> None:
    """One rank reads everything in ``ModelInfo.tensors``: what is listed and not read would be a weight without effect."""
    driver = one_rank_driver(DriverChoice(folder=str(folder)))
    if not driver.info.tensors:
        raise NotCheckable("the model lists no tensors")
    missed = sorted(set(SafetensorsCheckpoint(folder).names()) - set(driver.tensors_read))
    assert not missed, f"listed but not read: {', '.join(missed[:10])}"


def check_expert_tensors_have_a_slot_an_expert_and_stay_where_they_are(
    folder: Path, pool_of: Callable[[int], RankPool]
) -> None:
    driver = one_rank_driver(DriverChoice(folder=str(folder)))
    moe = driver.info.moe
    if moe is None:
        raise NotCheckable("the model has no routed experts")
    layers = driver.model.expert_tensors()
    assert tuple(layer.layer for layer in layers) == moe.layers, (
        "expert_tensors() is not in the order of info.moe.layers"
    )
    before = [tensor.data_ptr() for layer in layers for tensor in layer.tensors.values()]
    assert all(layer.num_slots == moe.num_logical_experts for layer in layers), "dim 0 must be the local slots"
    driver.step([{0: _prompt(driver)}])
    after = [tensor.data_ptr() for layer in driver.model.expert_tensors() for tensor in layer.tensors.values()]
    assert before == after, "expert tensors moved"


FOLDER_CHECKS = (
    check_chunks_and_single_tokens_equal_one_go,
    check_sequences_of_one_batch_do_not_touch_one_another,
    check_a_step_without_rows_runs_through,
    check_two_ranks_equal_one,
    check_every_listed_tensor_is_read_and_no_other,
    check_expert_tensors_have_a_slot_an_expert_and_stay_where_they_are,
)


def check_folder(folder: Path, pool_of: Callable[[int], RankPool]) -> None:
    """Every check on one small float32 checkpoint.

    Raises:
        AssertionError: a check does not hold.
    """
    for check in FOLDER_CHECKS:
        check(folder, pool_of)


@contextmanager
def _tiny_folder(case: PluginCase) -> Generator[Path]:
    config = tiny_config(case.name).to_dict() if case.name in FAMILIES else _own_config(case)
    with tempfile.TemporaryDirectory(prefix="crossdock-model-") as folder:
        yield write_random_checkpoint(Path(folder), config)


def _own_config(case: PluginCase) -> dict[str, Any]:
    """``tiny_config.json`` of the plugin's package."""
    package = load_plugin("model", case.name).module_name.rpartition(".")[0]
    file = files(package) / OWN_CONFIG
    if not file.is_file():
        raise NotCheckable(
            f"package {package} has no {OWN_CONFIG}; put the config of a small checkpoint beside plugin.py"
        )
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _on_tiny(check: Callable[[Path, Callable[[int], RankPool]], None]) -> Callable[[PluginCase], None]:
    def run(case: PluginCase) -> None:
        with _tiny_folder(case) as folder:
            check(folder, case.pool_of)

    run.__name__ = check.__name__
    return run


CHECKS = tuple(check_of(_on_tiny(check)) for check in FOLDER_CHECKS)
