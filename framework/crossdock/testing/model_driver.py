"""Runs a model on one rank with hand-made batches: no scheduler, no server. For the models' tests, ours and third parties'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch

from crossdock.attention import make_attention
from crossdock.checkpoint import SafetensorsCheckpoint
from crossdock.checkpoint_config import read_config
from crossdock.executor import Executor
from crossdock.micro_batches import ContextMaker
from crossdock.model import make_model, model_info
from crossdock.observe.timeline import PassMarks
from crossdock.overlap_decision import OverlapRules, decide_overlap
from crossdock.overlap_gate import with_vote
from crossdock.split import merge_logits
from crossdock.strategy import make_strategy
from crossdock.testing.model_parts import CPU, DriverChoice, make_moe_parts, make_pools
from crossdock.testing.world import RankContext
from crossdock.types.attention import AttentionSpec
from crossdock.types.batch import ForwardBatch
from crossdock.types.comm import Comms
from crossdock.types.layout import FULL_ROWS
from crossdock.types.model import Checkpoint, Model, ModelInfo, ModelSpec
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord

Work = Mapping[int, Sequence[int]]
"""Sequence id -> its next tokens, in the order of the batch."""


class ModelDriver:
    """One rank of a model. Pages are handed out in a scattered order."""

    def __init__(self, choice: DriverChoice, sizes: ParallelSizes, place: RankPlace, comms: Comms) -> None:
        self._choice, self._sizes, self._place = choice, sizes, place
        folder, dtype = Path(choice.folder), getattr(torch, choice.dtype)
        config = read_config(folder)
        self.info: ModelInfo = model_info(config, sizes, place)
        attention_spec = AttentionSpec(
            page_tokens=choice.page_tokens,
            num_heads=self.info.num_heads,
            kv=self.info.kv,
            dtype=dtype,
            device=CPU,
            row_invariant=choice.row_invariant,
        )
        self._attention = make_attention("torch", {}, attention_spec)
        strategy = make_strategy(choice.strategy, choice.strategy_options)
        checkpoint: Checkpoint = SafetensorsCheckpoint(folder)
        names = frozenset(checkpoint.names())
        in_flight = strategy.capabilities.micro_batches
        moe = make_moe_parts(choice, self.info.moe, sizes, place, comms, dtype, in_flight) if self.info.moe else None
        self._dispatch_rows = moe.dispatcher.capabilities.input_rows if moe else FULL_ROWS
        limits = strategy.capabilities.overlap
        self._limits = attrs.evolve(limits, is_gated=limits.is_gated and not choice.always_overlaps)
        self._rules = None
        if in_flight > 1:
            has_communication = moe is not None and moe.dispatcher.capabilities.split_is_useful
            self._rules = OverlapRules(limits=self._limits, has_communication=has_communication)
        spec = ModelSpec(
            config=config,
            checkpoint=checkpoint,
            sizes=sizes,
            place=place,
            comms=comms,
            dtype=dtype,
            device=CPU,
            attention=self._attention,
            moe=moe,
            dense_tp_size=choice.dense_tp_size,
        )
        self.model: Model = make_model(spec)
        self.tensors_read = names - frozenset(checkpoint.unused())
        self.caches = [make_pools(self.info.kv, choice, dtype) for _ in range(self.info.num_layers)]
        self.model.bind_kv_cache(self.caches)
        self._executor = Executor(self.model, strategy)
        self.overlap_reasons: list[str] = []
        """Of each step so far why it did not overlap; empty for one that did."""
        order = torch.Generator().manual_seed(0)
        self._free = (1 + torch.randperm(choice.num_pages - 1, generator=order)).tolist()
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._step = 0
        self.marks: PassMarks | None = None
        """Gets the moments of the operations of the next steps."""

    def step(self, work: Sequence[Work], *, last_only: bool = False) -> dict[int, torch.Tensor]:
        """One step of all replicas. Every rank passes the same ``work``, one entry a replica.

        Returns:
            Logits [tokens, vocab] of every sequence of this rank's replica; with ``last_only`` those of its last token, [1, vocab].
        """
        own = work[self._place.attn_dp_rank]
        batch = self._batch(work, own)
        wanted = [len(tokens) for tokens in own.values()]
        if last_only:
            batch = attrs.evolve(batch, logit_rows=torch.tensor(wanted, dtype=torch.int64).cumsum(0) - 1)
            wanted = [1] * len(wanted)
        self._step += 1
        maker = ContextMaker(
            attention=self._attention, sizes=self._sizes, dispatch_rows=self._dispatch_rows, overlap=self._limits
        )
        with torch.inference_mode():
            contexts = maker.contexts(batch, self._executor.plan(batch.step.forward_mode))
            logits = merge_logits(self._executor.run(contexts, self.marks))
        return dict(zip(own, logits.split(wanted), strict=True))

    def _with_overlap(self, plan: StepPlan, work: Sequence[Work]) -> StepPlan:
        """The plan with the decision that the replicas' records lead to."""
        records: list[StepRecord] = []
        for replica in work:
            lengths = [len(tokens) for tokens in replica.values()]
            record = StepRecord(num_tokens=sum(lengths), local_forward_mode=int(_mode([replica])), step=plan.step)
            records.append(with_vote(record, lengths, self._limits))
        overlap, reason = decide_overlap(records, plan.dispatch_mode, self._rules)
        self.overlap_reasons.append(reason)
        rows = tuple(record.overlap_rows for record in records) if overlap else ()
        return attrs.evolve(plan, overlap=overlap, overlap_reason=reason, overlap_rows=rows)

    def _batch(self, work: Sequence[Work], own: Work) -> ForwardBatch:
        live = tuple(sum(len(tokens) for tokens in replica.values()) for replica in work)
        plan = _step_plan(self._step, live, self._sizes.attn_tp_size, self._choice.padding_mode, _mode(work))
        plan = self._with_overlap(plan, work)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, tokens in own.items():
            start = self._lengths.get(sequence, 0)
            self._lengths[sequence] = start + len(tokens)
            pages = self._grown(sequence)
            ids += tokens
            where = range(start, start + len(tokens))
            positions += where
            size = self._choice.page_tokens
            slots += [pages[position // size] * size + position % size for position in where]
        padding = plan.padded_tokens[self._place.attn_dp_rank] - len(ids)
        width = max((len(self._pages[sequence]) for sequence in own), default=1)
        table = [self._pages[sequence] + [0] * (width - len(self._pages[sequence])) for sequence in own]
        return ForwardBatch(
            input_ids=torch.tensor(ids + [0] * padding, dtype=torch.int64),
            positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
            kv_slots=torch.tensor(slots + [0] * padding, dtype=torch.int64),
            page_table=torch.tensor(table, dtype=torch.int32).reshape(len(own), width),
            seq_lens=tuple(self._lengths[sequence] for sequence in own),
            query_lens=tuple(len(tokens) for tokens in own.values()),
            logit_rows=torch.arange(len(ids)),
            forward_mode=_mode([own]),
            step=plan,
            attn_dp_rank=self._place.attn_dp_rank,
            num_live_tokens=len(ids),
        )

    def _grown(self, sequence: int) -> list[int]:
        """Pages of a sequence, new ones poisoned."""
        pages = self._pages.setdefault(sequence, [])
        while len(pages) * self._choice.page_tokens < self._lengths[sequence]:
            pages.append(self._free.pop(0))
            for pools in self.caches if self._choice.poison_new_pages else ():
                for pool in pools:
                    pool[pages[-1]] = float("nan")
        return pages


def _step_plan(step: int, live: tuple[int, ...], attn_tp: int, padding: PaddingMode, mode: ForwardMode) -> StepPlan:
    padded = tuple(-(-count // attn_tp) * attn_tp for count in live)
    if padding is PaddingMode.MAX_LEN:
        padded = (max(padded),) * len(padded)
    return StepPlan(
        step=step,
        eplb_pass=0,
        live_tokens=live,
        padded_tokens=padded,
        padding_mode=padding,
        forward_mode=mode,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="one micro-batch",
    )


def _mode(work: Sequence[Work]) -> ForwardMode:
    lengths = {len(tokens) > 1 for replica in work for tokens in replica.values()}
    if not lengths:
        return ForwardMode.IDLE
    if len(lengths) == 2:
        return ForwardMode.MIXED
    return ForwardMode.PREFILL if lengths.pop() else ForwardMode.DECODE


def run_on_rank(
    context: RankContext, choice: DriverChoice, sizes: ParallelSizes, steps: Sequence[Sequence[Work]]
) -> list[dict[int, torch.Tensor]]:
    """Builds a driver on one rank of a pool and runs steps; logits of the rank's replica for each. For ``RankPool.run``."""
    torch.set_num_threads(1)
    driver = ModelDriver(choice, sizes, context.place(sizes), context.comms_of(sizes))
    return [driver.step(work) for work in steps]
