"""``crossdock generate``: new tokens for a list of prompts, or text for one."""

from __future__ import annotations

import json
import logging
import math
import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from crossdock.cli.flags import ConfigFlags, whole_number
from crossdock.cli.token_files import check_output, read_ids, write_json
from crossdock.errors import UsageError
from crossdock.launch.rank_logs import set_up_logs
from crossdock.rank_plan import model_folder
from crossdock.serving.tokenizer import TextTokenizer, load_tokenizer
from crossdock.types.request import SamplingParams

_NO_FLAGS = ConfigFlags()
_WHOLE = Parameter(converter=whole_number)


def generate(
    model: Path | None = None,
    /,
    *,
    ids: Path | None = None,
    prompt: str | None = None,
    max_new_tokens: Annotated[int, _WHOLE] = 64,
    ignore_eos: Annotated[bool, Parameter(negative="")] = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: Annotated[int, _WHOLE] = -1,
    seed: Annotated[int | None, _WHOLE] = None,
    out: Path | None = None,
    receipt: Path | None = None,
    flags: ConfigFlags = _NO_FLAGS,
) -> None:
    """Generate tokens for a list of prompts; greedy unless a temperature is given.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint; without it the bundled crossdock-mini.
    ids
        JSON file: a list of lists of token ids. The answer is a JSON list of lists of new token ids.
    prompt
        One prompt as text, instead of --ids. The answer is text.
    max_new_tokens
        Most new tokens a prompt.
    ignore_eos
        Go on after an end-of-sequence token.
    temperature
        0 is greedy.
    top_p
        Sample from the smallest set of tokens with this probability mass.
    top_k
        Sample from so many best tokens; -1 for all.
    seed
        Makes sampling repeatable; drawn when absent.
    out
        JSON file for the answer, instead of standard output.
    receipt
        JSON file for what was chosen and how often each mode ran.
    """
    set_up_logs(rank=None, log_file=None, level=logging.WARNING)
    config = flags.load(model).config
    sampling = _sampling(max_new_tokens, ignore_eos, temperature, top_p, top_k, seed)
    check_output(out)
    check_output(receipt, "--receipt")
    if (ids is None) == (prompt is None):
        raise UsageError("give either --ids FILE.json or --prompt TEXT")
    tokenizer = None
    if prompt is not None:
        tokenizer = _tokenizer(config.checkpoint.path)
        prompts = [tokenizer.encode(prompt)] if prompt else [[]]  # a start token alone would hide a forgotten text
        if not prompts[0]:
            raise UsageError("--prompt has length 0; give at least one character")
    else:
        assert ids is not None
        prompts = read_ids(ids)
    from crossdock.host_memory import bound_kernel_caches, keep_freed_memory
    from crossdock.offline import new_tokens, offline_job, run_job

    keep_freed_memory()
    bound_kernel_caches()
    result = run_job(offline_job(config.checkpoint.path, prompts, sampling, config))
    answers = [new_tokens(outputs) for outputs in result.ordered_outputs()]
    if receipt is not None:
        write_json(receipt, result.receipt)
    if tokenizer is None:
        _answer(answers, json.dumps(answers), out)
    else:
        texts = [tokenizer.decode(answer) for answer in answers]
        _answer(texts, "\n".join(texts), out)


def _sampling(
    max_new_tokens: int, ignore_eos: bool, temperature: float, top_p: float, top_k: int, seed: int | None
) -> SamplingParams:
    """Raises ``UsageError`` with the flag and the rule for a value out of range."""
    rules = (
        (max_new_tokens >= 0, f"--max-new-tokens must be at least 0, found {max_new_tokens}"),
        (0.0 <= temperature < math.inf, f"--temperature must be a number from 0 on, found {temperature}"),
        (0.0 < top_p <= 1.0, f"--top-p must be above 0 and at most 1, found {top_p}"),
        (top_k == -1 or top_k >= 1, f"--top-k must be -1 or at least 1, found {top_k}"),
    )
    for holds, sentence in rules:
        if not holds:
            raise UsageError(sentence)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=secrets.randbits(63) if seed is None else seed,
    )


def _tokenizer(path: str) -> TextTokenizer:
    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UsageError(f"{str(folder)!r} has no tokenizer.json, which --prompt needs; give token ids with --ids")
    return tokenizer


def _answer(value: object, text: str, out: Path | None) -> None:
    if out is None:
        print(text)
    else:
        write_json(out, value)
