"""Models and tokens: ``/v1/models``, ``/model_info``, ``/tokenize``, ``/detokenize``."""

from __future__ import annotations

from aiohttp import web

from crossdock.errors import RequestError
from crossdock.serving.chat_template import special_token_text
from crossdock.serving.frontend import FRONTEND, Frontend
from crossdock.serving.generation import PromptTokens
from crossdock.serving.http_io import json_response, typed_body
from crossdock.serving.prompts import check_prompts, message_values, text_prompts
from crossdock.serving.protocol.requests import DetokenizeBody, TokenizeBody
from crossdock.serving.protocol.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfoResponse,
)


async def get_models(request: web.Request) -> web.Response:
    """The served model as a list of one."""
    return json_response(ModelList(object="list", data=[_card(request.app[FRONTEND])]))


async def get_model(request: web.Request) -> web.Response:
    """The served model by its id; 404 for another one."""
    frontend = request.app[FRONTEND]
    frontend.model.check_name(request.match_info["model"], http_status=404)
    return json_response(_card(frontend))


async def get_model_info(request: web.Request) -> web.Response:
    """Folder, context and vocabulary of the model."""
    frontend = request.app[FRONTEND]
    return json_response(
        {
            "model_path": frontend.model.root,
            "tokenizer_path": None if frontend.tokenizer is None else frontend.model.root,
            "is_generation": True,
            "max_model_len": frontend.model.context_tokens,
            "vocab_size": frontend.model.vocab_size,
            "has_chat_template": frontend.chat_template.problem is None,
        }
    )


async def get_tokenizer_info(request: web.Request) -> web.Response:
    """Special tokens and chat template, for clients that build prompts themselves; 404 without a tokenizer."""
    frontend = request.app[FRONTEND]
    tokenizer = frontend.tokenizer
    if tokenizer is None:
        raise RequestError("this model folder has no tokenizer.json", http_status=404)
    config = tokenizer.config
    return json_response(
        TokenizerInfoResponse(
            tokenizer_class=str(config.get("tokenizer_class", "PreTrainedTokenizerFast")),
            vocab_size=tokenizer.vocab_size,
            model_max_length=frontend.model.context_tokens,
            bos_token=special_token_text(config.get("bos_token")) or None,
            eos_token=special_token_text(config.get("eos_token")) or None,
            pad_token=special_token_text(config.get("pad_token")) or None,
            unk_token=special_token_text(config.get("unk_token")) or None,
            chat_template=frontend.chat_template.source,
        )
    )


async def post_tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt, or of messages through the chat template."""
    frontend = request.app[FRONTEND]
    body = await typed_body(request, TokenizeBody)
    frontend.model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: exactly one of prompt and messages must be given", field="prompt")
    if body.prompt is not None:
        prompts = await text_prompts(
            [body.prompt], "prompt", frontend.tokenizer, add_special_tokens=body.add_special_tokens
        )
    else:
        text = frontend.chat_template.render(
            message_values(body.messages or ()),
            tools=None,
            add_generation_prompt=body.add_generation_prompt,
            arguments={},
        )
        prompts = await text_prompts([text], "messages", frontend.tokenizer, add_special_tokens=False)
    ids = list(prompts[0].ids)
    tokenizer = frontend.tokenizer
    return json_response(
        TokenizeResponse(
            count=len(ids),
            max_model_len=frontend.model.context_tokens,
            tokens=ids,
            token_strs=[tokenizer.token(one) or "" for one in ids] if tokenizer and body.return_token_strs else None,
        )
    )


async def post_detokenize(request: web.Request) -> web.Response:
    """Text of token ids."""
    frontend = request.app[FRONTEND]
    body = await typed_body(request, DetokenizeBody)
    frontend.model.check_name(body.model)
    if frontend.tokenizer is None:
        raise RequestError("tokens: this model folder has no tokenizer.json", field="tokens")
    if body.tokens:
        check_prompts([PromptTokens(ids=tuple(body.tokens))], "tokens", frontend.model)
    return json_response(DetokenizeResponse(prompt=frontend.tokenizer.decode(body.tokens, skip_special_tokens=False)))


def _card(frontend: Frontend) -> ModelCard:
    model = frontend.model
    return ModelCard(
        id=model.model_id,
        object="model",
        created=model.created,
        owned_by="crossdock",
        root=model.root,
        max_model_len=model.context_tokens,
    )
