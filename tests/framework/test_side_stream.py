"""Operations beside the others: where they start, who waits for them, and that nothing they read or write is given away too early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import pytest
import torch
from crossdock.executor import Executor
from crossdock.observe.timeline import CudaClock, HostClock, PassMarks
from crossdock.side_stream import CudaStreams
from crossdock.types.model import ForwardContext, Model, Op, OpKind
from crossdock.types.step import ForwardMode
from crossdock.types.strategy import StagePlan, Strategy, StrategyCapabilities


@attrs.define
class WrittenStreams:
    """Writes down what is issued where; a ticket is a place in the main stream's list or the name of the second's work."""

    main: list[str] = attrs.field(factory=list[str])
    second: list[tuple[list[Any], str]] = attrs.field(factory=list["tuple[list[Any], str]"])

    def mark(self) -> int:
        return len(self.main)

    def wait(self, ticket: Any) -> None:
        self.main.append(f"wait {ticket}")

    def run(self, compute: Callable[[], Any], after: Sequence[Any]) -> tuple[Any, str]:
        before = len(self.main)
        result = compute()
        names = self.main[before:]
        del self.main[before:]
        self.second.append((list(after), " ".join(names)))
        return result, " ".join(names)


@attrs.frozen
class ToyStep:
    forward_mode: ForwardMode = ForwardMode.PREFILL


@attrs.frozen
class ToyBatch:
    input_ids: torch.Tensor
    step: ToyStep = ToyStep()


@attrs.frozen
class ToyContext:
    batch: ToyBatch


@attrs.define
class OneLayer:
    """Embedding, a layer of given operations, head."""

    ops: Sequence[Op]
    carried: frozenset[str] = frozenset({"x"})

    @attrs.frozen
    class Info:
        num_layers: int = 2

    info = Info()

    def embed_ops(self) -> Sequence[Op]:
        return (Op(name="embed", kind=OpKind.EMBED, layer=-1, fn=lambda ctx: ctx.batch.input_ids, writes=("x",)),)

    def layer_ops(self, layer: int) -> Sequence[Op]:
        return [attrs.evolve(op, layer=layer) for op in self.ops]

    def head_ops(self) -> Sequence[Op]:
        return (Op(name="head", kind=OpKind.OUTPUT, layer=2, fn=lambda ctx, x: -x, reads=("x",), writes=("logits",)),)


@attrs.frozen
class SharedBeside:
    """One stage, the shared experts beside the others."""

    capabilities = StrategyCapabilities()

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        return StagePlan(stages=(tuple(ops),), beside=frozenset({OpKind.SHARED}))


def layer(note: Callable[[str], None], work: Callable[[torch.Tensor], torch.Tensor], shared_first: bool) -> list[Op]:
    def op(name: str, kind: OpKind, fn: Callable[..., Any], *keys: tuple[str, ...]) -> Op:
        def noted(context: object, *values: torch.Tensor) -> Any:
            note(name)
            return fn(*values)

        reads, keeps, writes = keys
        return Op(name=name, kind=kind, layer=0, fn=noted, reads=reads, keeps=keeps, writes=writes)

    begin = op("begin", OpKind.DISPATCH_BEGIN, lambda x: x * 2, (), ("h",), ("sent",))
    shared = op("shared", OpKind.SHARED, work, ("h",), (), ("s",))
    return [
        op("norm", OpKind.BOUNDARY, lambda x: x + 1, ("x",), (), ("h",)),
        begin,
        *([] if shared_first else [shared]),
        op("end", OpKind.DISPATCH_END, lambda sent: sent + 3, ("sent",), (), ("r",)),
        *([shared] if shared_first else []),
        op("output", OpKind.OUTPUT, lambda r, s: r + s, ("r", "s"), (), ("x",)),
    ]


def run(ops: Sequence[Op], x: torch.Tensor, streams: Any = None, marks: PassMarks | None = None) -> torch.Tensor:
    executor = Executor(cast("Model", OneLayer(ops)), cast("Strategy", SharedBeside()), streams)
    return executor.run([cast("ForwardContext", ToyContext(ToyBatch(x)))], marks)[0]


def test_an_operation_beside_starts_with_the_transfer_and_is_awaited_by_who_takes_its_result() -> None:
    streams = WrittenStreams()
    found = run(layer(streams.main.append, lambda h: h * 10, False), torch.tensor([1.0]), streams)
    assert streams.main == [
        *("norm", "begin", "end", "wait shared", "output"),
        *("norm", "begin", "end", "wait shared", "output"),
    ]
    # Behind the norm, not behind the transfer; in the second layer also behind the output that took the first one's result.
    assert streams.second == [([1], "shared"), ([6, 5], "shared")]
    plain = run(layer(lambda name: None, lambda h: h * 10, False), torch.tensor([1.0]))
    assert torch.equal(found, plain)


def test_an_input_that_is_written_after_the_begin_is_waited_for() -> None:
    streams = WrittenStreams()
    late = [
        Op(name="begin", kind=OpKind.DISPATCH_BEGIN, layer=0, fn=lambda ctx: 1, writes=("sent",)),
        Op(name="late", kind=OpKind.BOUNDARY, layer=0, fn=lambda ctx, x: x, reads=("x",), writes=("h",)),
        Op(name="shared", kind=OpKind.SHARED, layer=0, fn=lambda ctx, h: h, reads=("h",), writes=("s",)),
        Op(name="join", kind=OpKind.OUTPUT, layer=0, fn=lambda ctx, a, s: s, reads=("sent", "s"), writes=("x",)),
    ]
    streams.main.append("before")
    run(late, torch.tensor([1.0]), streams)
    assert streams.second[0][0] == [1], "a mark taken when the operation is issued"


def test_what_runs_beside_has_spans_of_its_own() -> None:
    marks = PassMarks(3, HostClock())
    run(layer(lambda name: None, lambda h: h, False), torch.tensor([1.0]), WrittenStreams(), marks)
    beside = [span for span in marks.spans() if span.is_beside]
    assert [(span.name, span.layer, span.category) for span in beside] == [
        ("shared", 0, "dense"),
        ("shared", 1, "dense"),
    ]
    assert all(span.duration_us >= 0 for span in beside)
    assert len(marks.spans()) == 2 + 2 * 5 + 2, "embedding, head, two layers, and those beside"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("captured", [False, True])
def test_on_a_gpu_results_do_not_depend_on_the_stream(captured: bool) -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    x = torch.rand(2048, 2048, device=device, generator=generator)

    def slow(h: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(2_000_000)
        return (h @ h.T).tanh()

    ops = layer(lambda name: None, slow, False)
    want = run(ops, x)
    streams = CudaStreams(device)
    marks = None if captured else PassMarks(0, CudaClock())
    if captured:
        graph = torch.cuda.CUDAGraph()
        run(ops, x, streams)
        with torch.cuda.graph(graph):
            got = run(ops, x, streams)
        graph.replay()
    else:
        got = run(ops, x, streams, marks)
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    if marks is not None:
        assert all(span.duration_us > 500 for span in marks.spans() if span.is_beside)
