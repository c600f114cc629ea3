"""Fields of other servers' interfaces that would change the output and that this one does not have.

Unknown keys are ignored; these are not unknown: whoever sends one relies on it, so it is refused by name instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from crossdock.errors import RequestError

_UNCONSTRAINED = "output is not constrained here; leave it out"
_ONE_MODEL = "the server has one model and no adapters; leave it out"


@attrs.frozen
class Unsupported:
    """Why, and what to do; the values that ask for nothing are let through."""

    advice: str
    harmless: tuple[object, ...]

    def asks_for_something(self, value: object) -> bool:
        """``value`` is none of the harmless ones; 1 and true are two values."""
        return not any(type(value) is type(one) and value == one for one in self.harmless)


_NOTHING: tuple[object, ...] = (None, False, "", 0, [], {})
"""Clients that fill in every field send these."""


def _fields(advice: str, *names: str, harmless: tuple[object, ...] = _NOTHING) -> dict[str, Unsupported]:
    return dict.fromkeys(names, Unsupported(advice, harmless))


_EVERYWHERE = {
    **_fields(
        _UNCONSTRAINED,
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema", "regex",
        "ebnf", "structural_tag", "grammar", "allowed_token_ids", "bad_words", "logits_processors",
        "custom_logit_processor",
    ),
    **_fields("tokens are sampled one by one; leave it out", "use_beam_search"),
    **_fields("tokens are sampled one by one; leave it out", "length_penalty", harmless=(None, 1, 1.0)),
    **_fields("shorten the prompt before sending it", "truncate_prompt_tokens"),
    **_fields("use stop", "stop_regex"),
    **_fields("use routed_dp_rank", "data_parallel_rank", harmless=(None,)),
    **_fields(_ONE_MODEL, "lora_path", "lora_request"),
    **_fields("only text and token ids are taken", "prompt_embeds", "input_embeds", "image_data", "audio_data"),
    **_fields("hidden states are not given out; leave it out", "return_hidden_states"),
    **_fields("each prefill is this server's own; leave it out", "kv_transfer_params", "bootstrap_host"),
    **_fields("special tokens are written without added spaces", "spaces_between_special_tokens", harmless=(None, True)),
}  # fmt: skip
_TOKENS_AS_IDS = _fields("POST /generate gives output_ids", "return_tokens_as_token_ids", "return_token_ids")
_COMPLETION = {
    **_EVERYWHERE,
    **_TOKENS_AS_IDS,
    **_fields("use echo with logprobs", "prompt_logprobs", harmless=(None,)),
    **_fields("use logprobs", "top_logprobs", harmless=(None,)),
    **_fields("chat fields belong to /v1/chat/completions", "messages", "tools"),
    **_fields(_UNCONSTRAINED, "response_format", harmless=(None, {"type": "text"})),
    **_fields("use include_stop_str_in_output", "no_stop_trim"),
}  # fmt: skip
_CHAT = {
    **_EVERYWHERE,
    **_TOKENS_AS_IDS,
    **_fields("a chat answer holds new text only; use /v1/completions", "echo"),
    **_fields("use /v1/completions with echo and logprobs", "prompt_logprobs", harmless=(None,)),
    **_fields("one sample is one answer; use n", "best_of", harmless=(None, 1)),
    **_fields("use tools", "functions", "function_call"),
    **_fields("use include_stop_str_in_output", "no_stop_trim"),
    **_fields("only text is generated; leave it out", "audio"),
    **_fields("only text is generated; leave it out", "modalities", harmless=(None, [], ["text"])),
    **_fields("the checkpoint's own template is used; use /v1/completions with a prompt of your own", "chat_template"),
    **_fields("an answer is always a new message; use /v1/completions", "continue_final_message"),
    **_fields("nothing is searched; put the documents into messages", "documents", "web_search_options"),
    **_fields("the template writes the special tokens; use /v1/completions", "add_special_tokens"),
}
_GENERATE = {
    **_EVERYWHERE,
    **_fields("use /v1/completions with echo and logprobs", "logprob_start_len", harmless=(None, -1)),
    **_fields("use top_logprobs_num", "token_ids_logprob"),
    **_fields("requests hold no session; send the whole prompt", "session_params"),
    **_fields("use return_logprob and /detokenize", "return_text_in_logprobs"),
    **_fields("requests are served in order of arrival; /v1/completions has priority", "priority"),
}
UNSUPPORTED: Mapping[str, Mapping[str, Unsupported]] = MappingProxyType(
    {
        "CompletionBody": _COMPLETION,
        "ChatBody": _CHAT,
        "GenerateBody": _GENERATE,
        "GenerateSampling": _EVERYWHERE,
    }
)
"""By the class of the body that a field would stand in."""


def refuse_unsupported(body: Mapping[str, Any], class_name: str, prefix: str = "") -> None:
    """Raises ``RequestError`` for the first key of ``body`` that asks for something unsupported."""
    table = UNSUPPORTED.get(class_name, {})
    for name, value in body.items():
        entry = table.get(name)
        if entry is not None and entry.asks_for_something(value):
            field = f"{prefix}{name}"
            raise RequestError(f"{field}: not supported; {entry.advice}", field=field)
