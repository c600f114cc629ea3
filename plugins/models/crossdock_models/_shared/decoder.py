"""A pre-norm decoder: embedding, layers of attention and feed-forward, final norm and head, as declared ops with boundaries between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from crossdock.boundary import Boundary, Stream
from crossdock.boundary_plan import attention_block, embedding_block, head_block, plan_boundaries
from crossdock.executor import EMBED_LAYER, LOGITS
from crossdock.ops.add_rms_norm import add_rms_norm
from crossdock.ops.rms_norm import rms_norm
from crossdock.rows import Rows
from crossdock.types.comm import Comms
from crossdock.types.experts import ExpertTensors
from crossdock.types.model import ForwardContext, ModelInfo, Op, OpKind
from crossdock.types.parallel import ParallelSizes

from crossdock_models._shared.feed_forward import FFN_IN, FFN_OUT, FeedForward
from crossdock_models._shared.rope_rows import StepRotations
from crossdock_models._shared.vocabulary import Embedding, Head

STREAM = "stream"
"""Between layers: the residual, and the last block's output that is not added yet."""
ROTATION = "rotation"
RESIDUAL = "residual"
"""Inside a layer: the stream while a block runs."""


class AttentionBlock(Protocol):
    """What a decoder layer wants of its first block."""

    def prepare(self, ctx: ForwardContext, hidden: Rows, rotation: torch.Tensor) -> Any:
        """Everything before attention itself; the result goes to ``core`` unopened."""
        ...

    def core(self, ctx: ForwardContext, prepared: Any) -> Rows:
        """Attention and output projection: the replica's rows, owing the sum over attention TP."""
        ...

    def bind(self, cache: tuple[torch.Tensor, ...]) -> None: ...


@attrs.frozen(kw_only=True, eq=False)
class DecoderLayer:
    """One layer's blocks and the norms before them."""

    attention: AttentionBlock
    feed_forward: FeedForward
    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class DecoderParts:
    """Everything of a decoder on one rank."""

    info: ModelInfo
    norm_eps: float
    embedding: Embedding
    rotations: StepRotations
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor
    head: Head
    expert_tensors: tuple[ExpertTensors, ...]
    read_expert: Callable[[int, int], Mapping[str, torch.Tensor]]
    """(row, logical expert) -> its tensors, read from the checkpoint again."""


class _EntryNorm:
    """The norm of a block's input, alone or together with the addition before it."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self._weight, self._eps)

    def after_add(self, residual: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(residual, update, self._weight, self._eps)


class _Entry:
    """The entry of one block: boundary and norm."""

    def __init__(self, boundary: Boundary, weight: torch.Tensor, eps: float) -> None:
        self._boundary = boundary
        self._norm = _EntryNorm(weight, eps)

    def from_stream(self, ctx: ForwardContext, stream: Stream) -> tuple[Rows, Stream]:
        return self._boundary.enter(stream, update=None, norm=self._norm, batch=ctx.batch)

    def after_block(self, ctx: ForwardContext, residual: Stream, output: Rows) -> tuple[Rows, Stream]:
        return self.from_stream(ctx, residual.followed_by(output))


class Decoder:
    """The ``Model`` of every family with this frame."""

    def __init__(self, parts: DecoderParts, sizes: ParallelSizes, comms: Comms) -> None:
        self._parts = parts
        blocks = [embedding_block()]
        for number, layer in enumerate(parts.layers):
            blocks += [attention_block(f"layer {number} attention"), layer.feed_forward.block]
        plans = plan_boundaries([*blocks, head_block()], sizes)
        norms = [norm for layer in parts.layers for norm in (layer.attention_norm, layer.ffn_norm)]
        self._entries = [
            _Entry(Boundary(plan, comms), weight, parts.norm_eps)
            for plan, weight in zip(plans, [*norms, parts.final_norm], strict=True)
        ]

    @property
    def info(self) -> ModelInfo:
        return self._parts.info

    @property
    def carried(self) -> frozenset[str]:
        return frozenset({STREAM, ROTATION})

    def embed_ops(self) -> Sequence[Op]:
        return (Op(name="embed", kind=OpKind.EMBED, layer=EMBED_LAYER, fn=self._embed, writes=(STREAM, ROTATION)),)

    def layer_ops(self, layer: int) -> Sequence[Op]:
        blocks, kinds = self._parts.layers[layer], OpKind
        enter_attention, enter_ffn = self._entries[2 * layer], self._entries[2 * layer + 1]
        return (
            Op(
                name="enter_attention",
                kind=kinds.BOUNDARY,
                layer=layer,
                fn=enter_attention.from_stream,
                reads=(STREAM,),
                writes=("attn_in", RESIDUAL),
            ),
            Op(
                name="attn_prepare",
                kind=kinds.ATTN_PREPARE,
                layer=layer,
                fn=blocks.attention.prepare,
                reads=("attn_in",),
                keeps=(ROTATION,),
                writes=("prepared",),
            ),
            Op(
                name="attn_core",
                kind=kinds.ATTN_CORE,
                layer=layer,
                fn=blocks.attention.core,
                reads=("prepared",),
                writes=("attn_out",),
            ),
            Op(
                name="enter_ffn",
                kind=kinds.BOUNDARY,
                layer=layer,
                fn=enter_ffn.after_block,
                reads=(RESIDUAL, "attn_out"),
                writes=(FFN_IN, RESIDUAL),
            ),
            *blocks.feed_forward.ops(layer),
            Op(
                name="leave_ffn",
                kind=kinds.OUTPUT,
                layer=layer,
                fn=leave_block,
                reads=(RESIDUAL, FFN_OUT),
                writes=(STREAM,),
            ),
        )

    def head_ops(self) -> Sequence[Op]:
        layer = self.info.num_layers
        return (
            Op(
                name="enter_head",
                kind=OpKind.BOUNDARY,
                layer=layer,
                fn=self._entries[-1].from_stream,
                reads=(STREAM,),
                writes=("head_in", RESIDUAL),
            ),
            Op(
                name="logits",
                kind=OpKind.OUTPUT,
                layer=layer,
                fn=self._logits,
                reads=("head_in", RESIDUAL, ROTATION),
                writes=(LOGITS,),
            ),
        )

    def bind_kv_cache(self, caches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for layer, cache in zip(self._parts.layers, caches, strict=True):
            layer.attention.bind(cache)

    def expert_tensors(self) -> Sequence[ExpertTensors]:
        return self._parts.expert_tensors

    def read_expert(self, row: int, logical_expert: int) -> Mapping[str, torch.Tensor]:
        return self._parts.read_expert(row, logical_expert)

    def _embed(self, ctx: ForwardContext) -> tuple[Stream, torch.Tensor]:
        embedded = self._parts.embedding(ctx.batch.input_ids)
        return Stream(pending=embedded), self._parts.rotations(ctx.batch)

    def _logits(self, ctx: ForwardContext, hidden: Rows, residual: Stream, rotation: torch.Tensor) -> torch.Tensor:
        """The last readers of stream and rotations let go of them here."""
        return self._parts.head(hidden.value.index_select(0, ctx.batch.logit_rows))


def leave_block(ctx: ForwardContext, residual: Stream, output: Rows) -> Stream:
    """The stream with a block's output waiting to be added."""
    return residual.followed_by(output)
