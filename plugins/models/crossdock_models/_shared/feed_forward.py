"""The feed-forward half of a layer as declared ops: dense, or routed experts with or without shared ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from crossdock.boundary_plan import BlockSpec
from crossdock.moe import MoeBlock, RoutedTokens
from crossdock.rows import Rows
from crossdock.types.comm import Comms
from crossdock.types.dispatch import Pending
from crossdock.types.model import ForwardContext, Op, OpKind

from crossdock_models._shared.gated_ffn import GatedFfn

FFN_IN = "ffn_in"
FFN_OUT = "ffn_out"


class FeedForward(Protocol):
    """What a decoder layer wants of its second block."""

    @property
    def block(self) -> BlockSpec:
        """Rows it takes and gives, and the sums that its output owes."""
        ...

    def ops(self, layer: int) -> Sequence[Op]:
        """Ops that consume ``ffn_in`` and write ``ffn_out``."""
        ...


class DenseFeedForward:
    """One SwiGLU block, or this rank's part of it."""

    def __init__(self, block: BlockSpec, ffn: GatedFfn, comms: Comms) -> None:
        self.block = block
        self._ffn = ffn
        self._comms = comms

    def ops(self, layer: int) -> Sequence[Op]:
        return (Op(name="dense", kind=OpKind.DENSE, layer=layer, fn=self.run, reads=(FFN_IN,), writes=(FFN_OUT,)),)

    def run(self, ctx: ForwardContext, hidden: Rows) -> Rows:
        return block_output(self._ffn, hidden, self.block, self._comms)


class MoeFeedForward:
    """Routed experts, and the shared expert where the model has one: computed while rows travel, added with weight 1."""

    def __init__(self, block: BlockSpec, moe: MoeBlock, shared: GatedFfn | None, comms: Comms) -> None:
        self.block = block
        self._moe = moe
        self._shared = shared
        self._comms = comms

    def ops(self, layer: int) -> Sequence[Op]:
        moe, kinds = self._moe, OpKind
        shared = self._shared is not None
        ops = [
            Op(name="route", kind=kinds.ROUTE, layer=layer, fn=moe.route, keeps=(FFN_IN,), writes=("routed",)),
            Op(
                name="dispatch_begin",
                kind=kinds.DISPATCH_BEGIN,
                layer=layer,
                fn=self.dispatch_begin,
                reads=("routed",) if shared else ("routed", FFN_IN),
                keeps=(FFN_IN,) if shared else (),
                writes=("dispatching",),
            ),
            Op(
                name="dispatch_end",
                kind=kinds.DISPATCH_END,
                layer=layer,
                fn=moe.dispatch_end,
                reads=("dispatching",),
                writes=("received",),
            ),
            Op(
                name="experts",
                kind=kinds.EXPERTS,
                layer=layer,
                fn=moe.experts,
                reads=("received",),
                writes=("expert_out", "way_back"),
            ),
            Op(
                name="combine_begin",
                kind=kinds.COMBINE_BEGIN,
                layer=layer,
                fn=moe.combine_begin,
                reads=("expert_out", "way_back"),
                writes=("combining",),
            ),
            Op(
                name="combine_end",
                kind=kinds.COMBINE_END,
                layer=layer,
                fn=moe.combine_end,
                reads=("combining",),
                writes=("routed_out",) if shared else (FFN_OUT,),
            ),
        ]
        if shared:
            ops.insert(
                2,
                Op(
                    name="shared",
                    kind=kinds.SHARED,
                    layer=layer,
                    fn=self.run_shared,
                    reads=(FFN_IN,),
                    writes=("shared_out",),
                ),
            )
            ops.append(
                Op(
                    name="add_shared",
                    kind=kinds.OUTPUT,
                    layer=layer,
                    fn=add_rows,
                    reads=("routed_out", "shared_out"),
                    writes=(FFN_OUT,),
                )
            )
        return tuple(ops)

    def dispatch_begin(self, ctx: ForwardContext, routed: RoutedTokens, hidden: Rows) -> Pending:
        return self._moe.dispatch_begin(ctx, hidden, routed)

    def run_shared(self, ctx: ForwardContext, hidden: Rows) -> Rows:
        """The shared expert on the rows that the router saw; it owes the same sums as the routed output, so that the two add up."""
        assert self._shared is not None, "the op is declared only with a shared expert"
        return block_output(self._shared, hidden, self.block, self._comms)


def block_output(ffn: GatedFfn, hidden: Rows, block: BlockSpec, comms: Comms) -> Rows:
    """Runs a feed-forward part on the block's input rows; the result lies and owes as the block declares."""
    assert block.output is not None, "a feed-forward block has an output"
    return Rows(ffn(hidden.value), block.output, block.owed, comms)


def add_rows(ctx: ForwardContext, routed: Rows, shared: Rows) -> Rows:
    return routed.add(shared)
