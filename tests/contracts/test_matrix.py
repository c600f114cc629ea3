"""Every combination of plugins and layouts: accepted ones give the logits of one process, the others are refused with their reason.

The axes come from what is installed, so a new plugin joins without an edit. CI takes combinations that cover each pair of values;
``make test-all`` the product of layouts, dispatchers, padding policies, pickers, families and loads.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from crossdock.compatibility import check_selection
from crossdock.config import Config
from crossdock.config_load import load_config, set_layer
from crossdock.errors import SelectionRefused
from crossdock.groups import resolve_sizes
from crossdock.offline_job import OfflineJob
from crossdock.plugin_call import call_hook
from crossdock.registry import installed, load_plugin
from crossdock.selection_parts import ONE_RANK_DISPATCHER
from crossdock.testing.engine_ranks import run_on_pool
from crossdock.testing.tiny_models import FAMILIES, oracle_logits, save_tiny_model
from crossdock.testing.world import RankPool
from crossdock.types.capability import Environment, Refusal
from crossdock.types.parallel import ParallelSizes
from crossdock.types.request import SamplingParams

OWN_RANKS_TOLERANCE = 1e-5
"""Largest difference to our own one-process run, relative to the largest logit, fp32."""
ORACLE_TOLERANCE = 1e-4
"""The same against transformers' classes."""
MAX_COMBINATIONS = 300
DRAWS = 60
"""Candidates that are drawn for each combination."""
FAKE_PICKERS = frozenset({"fake"})
"""They replace the router's decision, so only shape and finiteness can be checked."""
SCORING = SamplingParams(max_new_tokens=0, temperature=0.0)
LAYOUTS = (
    "1 dp1 tp1 ep1 mtp1",
    "2 dp2 tp1 ep2 mtp1", "2 dp1 tp2 ep2 mtp1", "2 dp2 tp1 ep1 mtp2", "2 dp1 tp2 ep1 mtp2",
    "4 dp4 tp1 ep4 mtp1", "4 dp2 tp2 ep4 mtp1", "4 dp1 tp4 ep4 mtp1",
    "4 dp4 tp1 ep2 mtp2", "4 dp2 tp2 ep2 mtp2", "4 dp1 tp4 ep2 mtp2",
    "4 dp4 tp1 ep1 mtp4", "4 dp2 tp2 ep1 mtp4", "4 dp1 tp4 ep1 mtp4",
)  # fmt: skip
"""ranks, attention DP, attention TP, MoE EP, MoE TP."""
LOADS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "uneven": ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (7,), (8, 2), (4, 4, 4), (1, 2, 3, 4, 5, 6, 7)),
    "one prompt": ((11, 12, 13, 14, 15),),
}
"""With one prompt every replica but one is idle; prompts longer than a chunk are computed in several steps."""


def names(point: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(plugin.name for plugin in installed(point)))


AXES: Mapping[str, Sequence[str]] = {
    "layout": LAYOUTS,
    "dispatcher": names("dispatcher"),
    "padding": names("padding"),
    "experts": names("experts"),
    "strategy": names("strategy"),
    "expert_location": names("expert_location"),
    "attention": names("attention"),
    "family": FAMILIES,
    "load": tuple(LOADS),
    "redundant": ("0", "4"),
    "dense": ("all ranks", "one", "attention TP"),
}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "two_batch": ("strategy.gate=always",),
    "two_batch_mixed": ("strategy.gate=always",),
}
"""Settings with which a plugin does what it is for in steps as small as these."""
PRODUCT_AXES = ("layout", "dispatcher", "padding", "expert_location", "strategy", "family", "load")
"""Walked in full; values of the other axes are drawn."""
SHOWN_FAILURES = 10
"""Of a layout, in the message."""


Covered: TypeAlias = tuple[tuple[str, str], ...]
"""Values of two or three axes that occur together."""


@attrs.frozen(kw_only=True)
class Combination:
    """One value for each axis."""

    values: tuple[str, ...]

    def __getitem__(self, axis: str) -> str:
        return self.values[list(AXES).index(axis)]

    def __str__(self) -> str:
        return "-".join(value.replace(" ", "_") for value in self.values)


def can_run(axis: str, value: str) -> bool:
    """False for a plugin whose device or dtype is not here, whatever it is combined with."""
    if axis not in ("dispatcher", "experts", "strategy", "expert_location", "attention"):
        return True
    said = capabilities_of(axis, value, LAYOUTS[0])
    dtypes = getattr(said, "weight_dtypes", getattr(said, "dtypes", ("float32",)))
    return not isinstance(said, Refusal) and "cpu" in getattr(said, "devices", ("cpu",)) and "float32" in dtypes


def wanted_tuples(axes: Mapping[str, Sequence[str]]) -> set[Covered]:
    """Every pair of values of two axes, and every triple of layout, dispatcher and padding."""
    sets = [*itertools.combinations(axes, 2), ("layout", "dispatcher", "padding")]
    return {
        tuple(zip(names_, values, strict=True))
        for names_ in sets
        for values in itertools.product(*(axes[name] for name in names_))
    }


def covered(combination: Combination, wanted: set[Covered]) -> set[Covered]:
    row = dict(zip(AXES, combination.values, strict=True))
    return {tuple_ for tuple_ in wanted if all(row[axis] == value for axis, value in tuple_)}


def few_combinations() -> list[Combination]:
    """Few combinations in which each wanted tuple occurs, in one that runs where that is possible: greedy, seeded.

    A tuple that no drawn combination runs with (an all-to-all dispatcher and a layout) is covered by a refused one, and so is, once,
    a plugin that cannot run here at all.
    """
    here = {axis: tuple(value for value in values if can_run(axis, value)) for axis, values in AXES.items()}
    wanted = wanted_tuples(here)
    draw = random.Random(0)
    chosen: list[Combination] = []
    while wanted:
        target = min(wanted)
        best, covers = None, {target}
        for _ in range(DRAWS):
            row = {axis: draw.choice(values) for axis, values in here.items()} | dict(target)
            candidate = Combination(values=tuple(row[axis] for axis in AXES))
            found = covered(candidate, wanted)
            if best is None or (len(found) > len(covers) and not expected_codes(candidate)):
                best, covers = candidate, covers if expected_codes(candidate) else found
        assert best is not None
        wanted -= covers
        chosen.append(best)
    for axis, values in AXES.items():
        for value in (value for value in values if value not in here[axis]):
            row = {name: draw.choice(choices) for name, choices in here.items()} | {axis: value}
            chosen.append(Combination(values=tuple(row[name] for name in AXES)))
    return chosen


def product() -> Iterator[Combination]:
    """Every value of ``PRODUCT_AXES`` with every other. The rest is drawn, from what can run here: taken in turn, an axis of two values
    would keep step with an axis of the product, and half of the pairs would never meet."""
    rest = {
        axis: tuple(value for value in values if can_run(axis, value))
        for axis, values in AXES.items()
        if axis not in PRODUCT_AXES
    }
    draw = random.Random(0)
    for values in itertools.product(*(AXES[axis] for axis in PRODUCT_AXES)):
        row = dict(zip(PRODUCT_AXES, values, strict=True)) | {axis: draw.choice(rest[axis]) for axis in rest}
        yield Combination(values=tuple(row[axis] for axis in AXES))


def sizes_of(layout: str) -> ParallelSizes:
    ranks, *rest = layout.split()
    dp, tp, ep, mtp = (int(word.lstrip("dmtpe")) for word in rest)
    return resolve_sizes(ranks=int(ranks), attn_dp_size=dp, attn_tp_size=tp, moe_ep_size=ep, moe_tp_size=mtp)


def config_of(combination: Combination, folder: Path) -> Config:
    sizes = sizes_of(combination["layout"])
    dense = {"all ranks": 0, "one": 1, "attention TP": sizes.attn_tp_size}[combination["dense"]]
    words = [
        f"checkpoint.path='{folder}'", "checkpoint.dtype=float32",
        f"parallel.ranks={sizes.ranks}", f"parallel.attn_dp_size={sizes.attn_dp_size}",
        f"parallel.attn_tp_size={sizes.attn_tp_size}", f"parallel.moe_ep_size={sizes.moe_ep_size}",
        f"parallel.moe_tp_size={sizes.moe_tp_size}", f"parallel.dense_tp_size={dense}",
        "scheduler.max_step_tokens=32", "scheduler.max_running_requests=8", "scheduler.chunk_tokens=4", "scheduler.page_tokens=4",
        f"eplb.num_redundant_experts={combination['redundant']}", "recorder.mode=stat",
    ]  # fmt: skip
    points = ("dispatcher", "padding", "experts", "strategy", "expert_location", "attention")
    words += [f"{point}.name={combination[point]}" for point in points]
    words += [word for value in combination.values for word in OPTIONS.get(value, ())]
    return load_config([set_layer(words)]).config


@functools.cache
def capabilities_of(point: str, name: str, layout: str) -> object:
    env = Environment(device="cpu", sizes=sizes_of(layout), dtype="float32", max_rows_per_rank=32)
    return call_hook(load_plugin(point, name), f"{point}_capabilities", options={}, env=env)


def expected_codes(combination: Combination) -> set[str]:
    """The reasons by what the plugins say about themselves, told apart from the core's own rules."""
    sizes = sizes_of(combination["layout"])
    points = ("dispatcher", "experts", "strategy", "expert_location", "attention")
    said = {point: capabilities_of(point, combination[point], combination["layout"]) for point in points}
    if sizes.ranks == 1 and "cpu" not in getattr(said["dispatcher"], "devices", ()):
        # One rank takes any dispatcher's name and sends nothing.
        said["dispatcher"] = capabilities_of("dispatcher", ONE_RANK_DISPATCHER, combination["layout"])
    own = {answer.code for answer in said.values() if isinstance(answer, Refusal)}
    if own:
        return own
    codes: set[str] = set()
    dispatcher, picker = said["dispatcher"], said["expert_location"]
    if any("cpu" not in getattr(answer, "devices", ("cpu",)) for answer in said.values()):
        codes.add("device_not_supported")
    dtypes = (getattr(said["experts"], "weight_dtypes", ()), getattr(said["attention"], "dtypes", ()))
    if any("float32" not in accepted for accepted in dtypes):
        codes.add("dtype_not_supported")
    if getattr(dispatcher, "needs_full_ep", False) and sizes.moe_ep_size != sizes.ranks:
        codes.add("a2a_needs_full_ep")
    sums_over_rows = getattr(dispatcher, "rank_invariant_picks_needed", False)
    if sums_over_rows and sizes.ranks > 1 and not getattr(picker, "rank_invariant", True):
        codes.add("rank_invariant_picks_needed")
    if getattr(said["strategy"], "micro_batches", 1) > getattr(dispatcher, "max_in_flight", 1):
        codes.add("too_many_in_flight")
    return codes


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random checkpoint of a family, written once."""

    @functools.cache
    def folder_of(family: str) -> Path:
        return save_tiny_model(tmp_path_factory.mktemp("matrix") / family, family, seed=3)

    return folder_of


@pytest.fixture(scope="session")
def reference(model_folder: Callable[[str], Path]) -> Callable[[str, str], list[npt.NDArray[np.float32]]]:
    """Logits of our own run in one process, each prompt alone in it, itself compared with transformers."""
    from crossdock.offline import logits

    @functools.cache
    def logits_of(family: str, load: str) -> list[npt.NDArray[np.float32]]:
        folder = model_folder(family)
        config = load_config([set_layer(["checkpoint.dtype=float32"])]).config
        own = [logits(folder, [prompt], config)[0] for prompt in LOADS[load]]
        for prompt, array in zip(LOADS[load], own, strict=True):
            oracle = oracle_logits(folder, list(prompt)).numpy()
            assert np.abs(array - oracle).max() <= ORACLE_TOLERANCE * np.abs(oracle).max()
        return own

    return logits_of


def check(
    combination: Combination,
    model_folder: Callable[[str], Path],
    reference: Callable[[str, str], list[npt.NDArray[np.float32]]],
    rank_pool: Callable[[int], RankPool],
) -> str:
    """What happened: ``matched``, ``ran``, or ``refused: CODES``."""
    config = config_of(combination, model_folder(combination["family"]))
    refusals: set[str] = set()
    try:
        check_selection(config)
    except SelectionRefused as refused:
        refusals = set(refused.codes)
    assert refusals == expected_codes(combination)
    if refusals:
        return "refused " + " and ".join(sorted(refusals))
    prompts = LOADS[combination["load"]]
    job = OfflineJob(config=config, prompts=prompts, sampling=(SCORING,) * len(prompts), keeps_logits=True)
    found = run_on_pool(rank_pool(config.parallel.ranks), job, timeout_s=90).logits
    expected = reference(combination["family"], combination["load"])
    for index, array in enumerate(expected):
        assert found[str(index)].shape == array.shape
        assert np.isfinite(found[str(index)]).all()
        if combination["expert_location"] not in FAKE_PICKERS:
            difference = np.abs(found[str(index)] - array).max() / np.abs(array).max()
            assert difference <= OWN_RANKS_TOLERANCE, f"prompt {index}: {difference:.1e} of the largest logit"
    return "ran with fake routing" if combination["expert_location"] in FAKE_PICKERS else "matched"


def group_of(combination: Combination) -> pytest.MarkDecorator:
    """Combinations of one world size share a pool of ranks, so they go to one worker."""
    return pytest.mark.xdist_group(f"matrix_{combination['layout'][0]}")


FEW = few_combinations()


@pytest.mark.parametrize("combination", [pytest.param(c, id=str(c), marks=group_of(c)) for c in FEW])
def test_a_combination_that_covers_new_pairs_matches_or_is_refused(
    combination: Combination,
    model_folder: Callable[[str], Path],
    reference: Callable[[str, str], list[npt.NDArray[np.float32]]],
    rank_pool: Callable[[int], RankPool],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("matrix_outcome", check(combination, model_folder, reference, rank_pool))


def test_the_pairs_are_covered_by_few_enough_combinations() -> None:
    here = {axis: [value for value in values if can_run(axis, value)] for axis, values in AXES.items()}
    wanted = wanted_tuples(here)
    for combination in FEW:
        wanted -= covered(combination, wanted)
    assert wanted == set()
    assert len(FEW) <= MAX_COMBINATIONS
    assert {value for combination in FEW for value in combination.values} == {
        value for values in AXES.values() for value in values
    }


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=pytest.mark.xdist_group(f"matrix_{layout[0]}")) for layout in LAYOUTS]
)
def test_every_combination_on_a_layout_matches_or_is_refused(
    layout: str,
    model_folder: Callable[[str], Path],
    reference: Callable[[str, str], list[npt.NDArray[np.float32]]],
    rank_pool: Callable[[int], RankPool],
    record_property: Callable[[str, object], None],
) -> None:
    failures: list[str] = []
    for combination in product():
        if combination["layout"] != layout:
            continue
        try:
            outcome = check(combination, model_folder, reference, rank_pool)
        except AssertionError as error:
            failures.append(f"{combination}: {error}")
        else:
            record_property("matrix_outcome", outcome)
    assert not failures, "\n".join([f"{len(failures)} combinations failed:", *failures[:SHOWN_FAILURES]])


def test_values_of_the_product_meet_whatever_axis_they_are_of() -> None:
    met = {
        pair
        for combination in product()
        for pair in itertools.combinations(zip(AXES, combination.values, strict=True), 2)
    }
    here = {
        axis: [value for value in values if axis in PRODUCT_AXES or can_run(axis, value)]
        for axis, values in AXES.items()
    }
    assert wanted_tuples(here) - met == {tuple_ for tuple_ in wanted_tuples(here) if len(tuple_) > 2}
