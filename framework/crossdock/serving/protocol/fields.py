"""Field types of request bodies with their ranges; msgspec checks them and writes them into the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024

Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2, description="0 is greedy")]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, description="-1 or 0: all")]
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0, le=10, description="1 is none")]
Choices: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenCount: TypeAlias = Annotated[int, Meta(ge=0)]
PositiveTokenCount: TypeAlias = Annotated[int, Meta(ge=1)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Priority: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="smaller goes first")]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Prompt: TypeAlias = str | list[str | int | list[int]]
"""A text, several texts, one list of token ids or several of them; ``validation`` refuses mixtures."""
