"""Ranks agree at start, or every rank raises and names the odd one and the field."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from crossdock.agreement import agreement_fields, check_agreement
from crossdock.compatibility import check_selection
from crossdock.config_load import load_config, set_layer
from crossdock.errors import AgreementError
from crossdock.groups import resolve_sizes
from crossdock.testing.world import RankContext, RankPool
from crossdock.types.selection import Selection

PoolOf = Callable[[int], RankPool]


def selection() -> Selection:
    return check_selection(load_config([set_layer(["parallel.ranks=4", "dispatcher.name=alltoallv"])]).config)


def told(context: RankContext, fields_by_rank: list[dict[str, str]]) -> tuple[str, tuple[int, ...], str] | None:
    world = context.comms_of(resolve_sizes(ranks=context.size)).world
    try:
        check_agreement(fields_by_rank[context.rank], world, torch.device("cpu"))
    except AgreementError as error:
        return str(error), error.odd_ranks, error.field
    return None


def with_version(version: str) -> dict[str, str]:
    plugins = tuple(
        attrs.evolve(plugin, version=version) if plugin.point == "dispatcher" else plugin
        for plugin in selection().plugins
    )
    return agreement_fields(attrs.evolve(selection(), plugins=plugins))


def test_every_plugin_has_its_six_fields() -> None:
    fields = agreement_fields(selection())
    for field in ("name", "distribution", "version", "hook_api_version", "options", "capabilities"):
        assert f"dispatcher.{field}" in fields
    assert fields["dispatcher.name"] == "alltoallv"
    assert '"needs_full_ep": true' in fields["dispatcher.capabilities"]


def test_equal_ranks_pass(rank_pool: PoolOf) -> None:
    assert rank_pool(4).run(told, [agreement_fields(selection())] * 4, timeout_s=60) == [None] * 4


def test_a_rank_with_another_version_is_named_on_every_rank(rank_pool: PoolOf) -> None:
    fields = [with_version("0.1.0"), with_version("0.1.0"), with_version("0.0.9"), with_version("0.1.0")]
    for answer in rank_pool(4).run(told, fields, timeout_s=60):
        assert answer is not None
        message, odd, field = answer
        assert (odd, field) == ((2,), "dispatcher.version")
        assert "rank 2 found 0.0.9, the others 0.1.0" in message


def test_options_of_different_length_are_compared_too(rank_pool: PoolOf) -> None:
    fields = [{"dispatcher.options": "{}"}, {"dispatcher.options": '{"mode": "normal", "rows": 4096}', "extra": "x"}]
    for answer in rank_pool(2).run(told, fields, timeout_s=60):
        assert answer is not None
        assert answer[2] == "dispatcher.options"


def test_a_field_that_one_rank_lacks_is_a_difference(rank_pool: PoolOf) -> None:
    for answer in rank_pool(2).run(told, [{"a": "1"}, {"a": "1", "observer.x.name": "x"}], timeout_s=60):
        assert answer is not None
        assert answer[2] == "observer.x.name"
        assert "absent" in answer[0]


def test_the_fields_do_not_depend_on_the_hash_seed() -> None:
    import subprocess
    import sys

    code = (
        "from crossdock.agreement import agreement_fields; from crossdock.compatibility import check_selection;"
        "from crossdock.config import Config; print(agreement_fields(check_selection(Config())))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


def test_a_value_without_a_plain_form_is_refused() -> None:
    from crossdock.plain_value import plain_value

    with pytest.raises(TypeError, match="Tensor has no plain form"):
        plain_value({"x": torch.zeros(1)})
