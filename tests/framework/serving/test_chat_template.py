"""Chat templates: what they may use, what they may not do, and how their mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from crossdock.errors import CheckpointError, RequestError
from crossdock.serving.chat_template import ChatTemplate, load_chat_template
from crossdock.serving.tokenizer import read_tokenizer_config

HI = [{"role": "user", "content": "hi"}]


def template(tmp_path: Path, source: object, **config: object) -> ChatTemplate:
    return load_chat_template(tmp_path, {"chat_template": source, **config})


def render(made: ChatTemplate, **arguments: object) -> str:
    return made.render(HI, tools=None, add_generation_prompt=True, arguments=arguments)


def test_special_tokens_messages_and_arguments_are_there(tmp_path: Path) -> None:
    made = template(
        tmp_path,
        "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ mood }}",
        bos_token={"content": "<s>"},
        eos_token="</s>",
        pad_token=None,
    )
    assert render(made, mood="!") == "<s></s>hiTrue!"


def test_json_in_prompts_is_not_escaped_for_html(tmp_path: Path) -> None:
    assert render(template(tmp_path, "{{ {'a': '<\u6f22>'} | tojson }}")) == '{"a": "<\u6f22>"}'


def test_the_time_has_the_form_that_was_asked_for(tmp_path: Path) -> None:
    assert len(render(template(tmp_path, "{{ strftime_now('%Y-%m-%d') }}"))) == 10


def test_loops_may_be_left_early(tmp_path: Path) -> None:
    assert (
        render(template(tmp_path, "{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"))
        == "01"
    )


def test_a_file_wins_over_the_config_and_a_list_has_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert render(template(tmp_path, named)) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert render(template(tmp_path, named)) == "file"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined_name.field }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_a_request_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(RequestError) as refused:
        render(template(tmp_path, source))
    assert refused.value.field == "messages"
    assert refused.value.http_status == 400


@pytest.mark.parametrize(
    ("source", "words"), [(None, "no chat template"), (5, "no chat template"), ("{% if %}", "line 1")]
)
def test_no_usable_template_is_a_known_problem(tmp_path: Path, source: object, words: str) -> None:
    made = template(tmp_path, source)
    assert made.problem is not None
    assert words in made.problem
    with pytest.raises(RequestError, match=words):
        render(made)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_tokenizer_config_is_an_error_at_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        read_tokenizer_config(tmp_path)
