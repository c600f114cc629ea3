"""A profile is started and stopped in any order: wrong ones are said and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from crossdock.errors import ConfigValueError
from crossdock.groups import rank_place, resolve_sizes
from crossdock.observe.timeline import Timeline
from crossdock.observe.trace_files import read_trace
from crossdock.profile_verbs import ProfileVerbs
from crossdock.types.model import Op, OpKind
from hypothesis import given
from hypothesis import strategies as st

SIZES = resolve_sizes(ranks=4, attn_dp_size=2)


def verbs_of(rank: int) -> ProfileVerbs:
    return ProfileVerbs(timeline=Timeline(rank=rank), place=rank_place(SIZES, rank), sizes=SIZES)


def run_pass(timeline: Timeline, step: int) -> None:
    marks = timeline.begin_pass(step)
    if marks is not None:
        marks.begin()
        marks.op_ended(0, Op(name="experts", kind=OpKind.EXPERTS, layer=0, fn=lambda context: None))
    timeline.pass_launched()
    timeline.end_pass()


def test_a_leader_names_the_files_of_its_peers_and_each_rank_writes_its_own(tmp_path: Path) -> None:
    ranks = [verbs_of(rank) for rank in range(4)]
    for verbs in ranks:
        verbs.start({"output_dir": str(tmp_path / "new")})
        run_pass(verbs.timeline, 1)
    answers = [verbs.stop({}) for verbs in ranks]
    assert (
        answers[2]["files"]
        == answers[3]["files"]
        == [str(tmp_path / "new" / f"crossdock-profile1-rank{rank}.trace.json") for rank in (2, 3)]
    )
    assert sorted(str(path) for path in (tmp_path / "new").iterdir()) == answers[0]["files"] + answers[2]["files"]
    assert all(list(read_trace(Path(answers[rank]["files"][rank % 2]))) == [rank] for rank in range(4))


@given(verbs=st.lists(st.sampled_from(["start", "stop", "pass"]), max_size=12))
def test_any_order_of_verbs_leaves_as_many_files_as_profiles_that_were_stopped(
    tmp_path_factory: pytest.TempPathFactory, verbs: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("profiles")
    profile = verbs_of(0)
    is_on, stopped, kept = False, 0, 0
    for step, verb in enumerate(verbs):
        if verb == "pass":
            run_pass(profile.timeline, 16 * step + 1)
            kept += is_on
        elif (verb == "start") == is_on:
            with pytest.raises(ConfigValueError, match="stop it first" if is_on else "start one first"):
                getattr(profile, verb)({"output_dir": str(folder)})
        elif is_on:
            answer = profile.stop({})
            assert answer["operations"] == kept
            is_on, stopped = False, stopped + 1
        else:
            assert len(profile.start({"output_dir": str(folder)})["files"]) == SIZES.attn_tp_size
            is_on, kept = True, 0
        assert profile.timeline.is_profiling == is_on
    assert len(list(folder.iterdir())) == stopped


def test_files_are_named_so_that_a_client_elsewhere_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ({}, {"output_dir": ""}, {"output_dir": None}, {"output_dir": "."}):
        profile = verbs_of(0)
        names = profile.start(arguments)["files"]
        assert [Path(name).parent for name in names] == [tmp_path] * 2


def test_a_folder_that_cannot_be_made_starts_nothing_and_the_next_start_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profile = verbs_of(0)
    with pytest.raises(OSError, match="file"):
        profile.start({"output_dir": str(tmp_path / "file" / "folder")})
    assert not profile.timeline.is_profiling
    assert profile.start({"output_dir": str(tmp_path)})["files"]
