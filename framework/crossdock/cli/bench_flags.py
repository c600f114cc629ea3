"""Flags that several benchmarks share, and the answer they give."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from crossdock.cli.flags import whole_number
from crossdock.cli.token_files import check_output, write_json
from crossdock.errors import UsageError
from crossdock.launch.rank_logs import set_up_logs


def _count(help: str) -> Parameter:
    return Parameter(help=help, converter=whole_number)


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class RoundFlags:
    """How often something is measured, and where the result goes."""

    num_iters: Annotated[int, _count("Measured rounds.")] = 10
    num_iters_warmup: Annotated[int, _count("Rounds before them.")] = 3
    seed: Annotated[int, _count("Of everything random.")] = 0
    out: Annotated[Path | None, Parameter(help="JSON file for the result, instead of standard output.")] = None

    def prepare(self) -> None:
        """Logs to stderr, warnings only.

        Raises:
            UsageError: no round, or ``out`` cannot become a file.
        """
        set_up_logs(rank=None, log_file=None, level=logging.WARNING)
        check_output(self.out)
        positive("--num-iters", self.num_iters)

    def answer(self, report: object) -> None:
        """The report as JSON, to the file or to standard output."""
        if self.out is None:
            print(json.dumps(report, indent=1))
        else:
            write_json(self.out, report)


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class LengthFlags:
    """Tokens of every request."""

    input_len: Annotated[int, _count("Tokens of each prompt.")] = 32
    output_len: Annotated[int, _count("Tokens to generate for each, whatever the model's end of text.")] = 128


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class LayerFlags:
    """A MoE layer without a checkpoint."""

    num_tokens: Annotated[tuple[int, ...], Parameter(help="Rows of a rank; may be repeated.", negative="")] = (
        1,
        32,
        128,
    )
    hidden_size: Annotated[int, _count("Elements of a row.")] = 512
    num_experts: Annotated[int, _count("Experts to choose from.")] = 32
    top_k: Annotated[int, _count("Experts of a row.")] = 4

    def check(self) -> None:
        """Raises ``UsageError`` for a number that cannot be."""
        positive("--hidden-size", self.hidden_size)
        positive("--top-k", self.top_k)
        for count in self.num_tokens:
            positive("--num-tokens", count)
        if self.top_k > self.num_experts:
            raise UsageError(f"--top-k {self.top_k} is more than --num-experts {self.num_experts}")


def positive(flag: str, value: int) -> None:
    """Raises ``UsageError`` for a number below 1."""
    if value < 1:
        raise UsageError(f"{flag} must be at least 1, found {value}")
