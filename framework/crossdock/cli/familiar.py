"""Flags that users know from other engines: taken where they mean the same, else an error that names ours.

One table; ``docs/familiar-flags.md`` is made from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.errors import UsageError


@attrs.frozen(kw_only=True)
class FamiliarFlag:
    """One flag of another engine.

    Exactly one of the three says what happens: ``ours`` takes the value over, ``becomes`` stands for the flag (by value, or under ``""``
    for a switch), ``advice`` refuses and says what to write instead.
    """

    names: tuple[str, ...]
    engines: str
    ours: str = ""
    becomes: dict[str, tuple[str, ...]] = attrs.field(factory=dict[str, tuple[str, ...]])
    advice: str = ""

    @property
    def is_switch(self) -> bool:
        """Takes no value."""
        return set(self.becomes) == {""}


def _set(assignment: str) -> tuple[str, ...]:
    return ("--set", assignment)


_BOTH, _SGLANG, _VLLM = "SGLang, vLLM", "SGLang", "vLLM"

FAMILIAR_FLAGS: tuple[FamiliarFlag, ...] = (
    FamiliarFlag(names=("--model", "--model-path"), engines=_BOTH, ours="checkpoint.path"),
    FamiliarFlag(names=("--tp", "--tp-size", "--tensor-parallel-size"), engines=_BOTH, ours="parallel.ranks"),
    FamiliarFlag(
        names=("--dp", "--dp-size", "--data-parallel-size"),
        engines=_BOTH,
        advice="the engines count ranks differently here: give all ranks with --ranks and the attention replicas with --attn-dp",
    ),
    FamiliarFlag(names=("--attn-dp-size",), engines=_SGLANG, ours="parallel.attn_dp_size"),
    FamiliarFlag(names=("--attn-cp-size",), engines=_SGLANG, ours="parallel.attn_cp_size"),
    FamiliarFlag(names=("--moe-dp-size",), engines=_SGLANG, ours="parallel.moe_dp_size"),
    FamiliarFlag(names=("--ep", "--ep-size", "--expert-parallel-size"), engines=_SGLANG, ours="parallel.moe_ep_size"),
    FamiliarFlag(names=("--moe-dense-tp-size",), engines=_SGLANG, ours="parallel.dense_tp_size"),
    FamiliarFlag(names=("--enable-expert-parallel",), engines=_VLLM, becomes={"": _set("parallel.moe_ep_size=0")}),
    FamiliarFlag(
        names=("--enable-dp-attention",), engines=_SGLANG, advice="give the number of attention replicas with --attn-dp"
    ),
    FamiliarFlag(
        names=("--moe-a2a-backend",),
        engines=_SGLANG,
        becomes={
            "none": ("--dispatcher", "allgatherv"),
            "deepep": ("--dispatcher", "deepep"),
            "mooncake": ("--dispatcher", "mooncake"),
        },
    ),
    FamiliarFlag(
        names=("--all2all-backend",),
        engines=_VLLM,
        becomes={
            "allgather_reducescatter": ("--dispatcher", "allgatherv"),
            "deepep_high_throughput": ("--dispatcher", "deepep", *_set("dispatcher.mode=normal")),
            "deepep_low_latency": ("--dispatcher", "deepep", *_set("dispatcher.mode=low_latency")),
        },
    ),
    FamiliarFlag(
        names=("--deepep-mode",),
        engines=_SGLANG,
        becomes={mode: _set(f"dispatcher.mode={mode}") for mode in ("auto", "normal", "low_latency")},
    ),
    FamiliarFlag(names=("--enable-eplb",), engines=_BOTH, becomes={"": _set("eplb.enabled=true")}),
    FamiliarFlag(names=("--ep-num-redundant-experts",), engines=_SGLANG, ours="eplb.num_redundant_experts"),
    FamiliarFlag(names=("--eplb-rebalance-num-iterations",), engines=_SGLANG, ours="eplb.interval"),
    FamiliarFlag(
        names=("--eplb-algorithm",),
        engines=_SGLANG,
        becomes={
            "deepseek": _set("eplb_algo.name=global"),
            "deepseek_hierarchical": _set("eplb_algo.name=hierarchical"),
            "elasticity_aware": _set("eplb_algo.name=elastic"),
        },
    ),
    FamiliarFlag(
        names=("--eplb-config",),
        engines=_VLLM,
        advice="write the values into [eplb] of the TOML file, or --set eplb.num_redundant_experts=N --set eplb.interval=N",
    ),
    FamiliarFlag(names=("--init-expert-location",), engines=_SGLANG, ours="eplb.init_location"),
    FamiliarFlag(names=("--ep-dispatch-algorithm",), engines=_SGLANG, ours="expert_location.name"),
    FamiliarFlag(
        names=("--expert-distribution-recorder-mode",),
        engines=_SGLANG,
        becomes={mode: _set(f"recorder.mode={mode}") for mode in ("stat", "stat_approx", "per_pass", "per_token")},
    ),
    FamiliarFlag(names=("--expert-distribution-recorder-buffer-size",), engines=_SGLANG, ours="recorder.buffer_steps"),
    FamiliarFlag(
        names=("--enable-two-batch-overlap", "--enable-dbo"), engines=_BOTH, becomes={"": ("--strategy", "two_batch")}
    ),
    FamiliarFlag(
        names=("--enable-single-batch-overlap",), engines=_SGLANG, becomes={"": ("--strategy", "single_batch")}
    ),
    FamiliarFlag(names=("--max-num-seqs",), engines=_VLLM, ours="scheduler.max_running_requests"),
    FamiliarFlag(names=("--max-num-batched-tokens",), engines=_VLLM, ours="scheduler.max_step_tokens"),
    FamiliarFlag(names=("--max-model-len", "--context-length"), engines=_BOTH, ours="scheduler.max_sequence_tokens"),
    FamiliarFlag(names=("--page-size", "--block-size"), engines=_BOTH, ours="scheduler.page_tokens"),
    FamiliarFlag(
        names=("--max-running-requests",),
        engines=_SGLANG,
        advice="SGLang's is for all replicas, ours for each: --set scheduler.max_running_requests=N",
    ),
    FamiliarFlag(
        names=("--chunked-prefill-size",),
        engines=_SGLANG,
        advice="SGLang's is divided by the replicas, ours is for each: --set scheduler.chunk_tokens=N",
    ),
    FamiliarFlag(
        names=("--disable-radix-cache", "--no-enable-prefix-caching"),
        engines=_BOTH,
        becomes={"": _set("scheduler.prefix_cache=false")},
    ),
    FamiliarFlag(
        names=("--mem-fraction-static", "--gpu-memory-utilization"),
        engines=_BOTH,
        advice="give the size of the KV pool of a replica in tokens: --set scheduler.kv_tokens=N",
    ),
    FamiliarFlag(
        names=("--attention-backend",),
        engines=_BOTH,
        advice="our backends have other names: --attention auto|torch|...",
    ),
    FamiliarFlag(
        names=("--moe-runner-backend",),
        engines=_SGLANG,
        advice="our backends have other names: --experts auto|torch|...",
    ),
    FamiliarFlag(names=("--dist-init-addr",), engines=_SGLANG, ours="launch.rdzv_endpoint"),
    FamiliarFlag(
        names=("--api-key",),
        engines=_BOTH,
        advice="a key on a command line is seen by others: --set server.api_key_file=FILE",
    ),
    FamiliarFlag(
        names=("--trust-remote-code",),
        engines=_BOTH,
        advice="leave it out: model code comes from plugins, never from a checkpoint",
    ),
    FamiliarFlag(
        names=("--tokenizer", "--tokenizer-path"),
        engines=_BOTH,
        advice="the tokenizer is read from the checkpoint's folder",
    ),
)


def translate_familiar_flags(words: Sequence[str]) -> list[str]:
    """The command line with familiar flags turned into ours; everything else is left as it is.

    Raises:
        UsageError: a familiar flag means something else here; the message names ours.
    """
    by_name = {name: flag for flag in FAMILIAR_FLAGS for name in flag.names}
    translated: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*translated, word, *rest]
        name, equals, value = word.partition("=")
        flag = by_name.get(name)
        if flag is None:
            translated.append(word)
            continue
        if flag.advice:
            raise UsageError(f"{name} ({flag.engines}): {flag.advice}")
        if flag.is_switch:
            translated.extend(flag.becomes[""])
            continue
        if not equals:
            if not rest:
                raise UsageError(f"{name} needs a value")
            value = rest.pop(0)
        translated.extend(_with_value(name, flag, value))
    return translated


def _with_value(name: str, flag: FamiliarFlag, value: str) -> tuple[str, ...]:
    if flag.ours:
        return _set(f"{flag.ours}={value}")
    if value not in flag.becomes:
        known = ", ".join(flag.becomes)
        raise UsageError(f"{name} ({flag.engines}): {value!r} has no counterpart here; these have one: {known}")
    return flag.becomes[value]
