"""A model as plain modules that declare their operations (DESIGN section 8)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from crossdock.types.attention import Attention, AttnMetadata, KvSpec
from crossdock.types.batch import ForwardBatch
from crossdock.types.dispatch import Dispatcher, DispatchStep
from crossdock.types.experts import Experts, ExpertTensors

if TYPE_CHECKING:
    import torch

    from crossdock.types.comm import Comms
    from crossdock.types.location import LoadRecorder, Picker, PlacementMaps
    from crossdock.types.parallel import ParallelSizes, RankPlace


class OpKind(enum.Enum):
    """What an op is, so that a strategy knows where to cut."""

    EMBED = "embed"
    ATTN_PREPARE = "attn_prepare"
    ATTN_CORE = "attn_core"
    BOUNDARY = "boundary"
    ROUTE = "route"
    DISPATCH_BEGIN = "dispatch_begin"
    DISPATCH_END = "dispatch_end"
    EXPERTS = "experts"
    COMBINE_BEGIN = "combine_begin"
    COMBINE_END = "combine_end"
    SHARED = "shared"
    DENSE = "dense"
    OUTPUT = "output"


@attrs.frozen(kw_only=True, eq=False)
class ForwardContext:
    """What every op of one (micro-)batch may read; never written by an op."""

    batch: ForwardBatch
    attn_metadata: AttnMetadata
    dispatch_step: DispatchStep
    slot: int = 0
    """Micro-batch index; buffers of the dispatcher belong to it."""
    sm_budget: int | None = None


@attrs.frozen(kw_only=True, eq=False)
class Op:
    """One operation of a layer.

    The executor calls ``fn(context, *values)`` with the values of ``reads`` (consumed: the state forgets them) followed by those
    of ``keeps`` (left in the state), and stores the result under ``writes``: one value for one name, a tuple for several.
    State is write-once: writing a live key or reading an absent one is an error. After the last op of a layer exactly the
    keys in the model's ``carried`` are left.
    """

    name: str
    kind: OpKind
    layer: int
    fn: Callable[..., Any]
    reads: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class MoeSpec:
    """The routed experts of a model."""

    layers: tuple[int, ...]
    """Model layer numbers that hold routed experts, ascending; index in it = row of placements and counters."""
    num_logical_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_groups: int = 1
    """Expert groups of group-limited routing, for hierarchical placement."""
    weight_dtype: str = "native"
    """``native`` or ``fp8_block``."""


@attrs.frozen(kw_only=True)
class TensorSpec:
    """A tensor that a model reads from its checkpoint."""

    shape: tuple[int, ...]
    fp8_block: bool = False
    """True when the config says that it is stored as float8_e4m3fn with 128 x 128 block scales beside it (``<name>_scale_inv``)."""


@attrs.frozen(kw_only=True)
class ModelInfo:
    """Facts of a checkpoint that the core needs before weights are loaded."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    kv: KvSpec
    """Per rank, of every layer."""
    num_heads: int
    """Query heads of this rank."""
    moe: MoeSpec | None
    eos_token_ids: tuple[int, ...] = ()
    tensors: Mapping[str, TensorSpec] = attrs.field(factory=dict, eq=False, repr=False)
    """Every tensor that the model reads on any rank, experts one by one; the core checks the checkpoint against it and random
    weights are made from it. Empty: the model checks for itself."""
    renames: tuple[tuple[str, str], ...] = ()
    """Whole dotted components of checkpoint names and what ``tensors`` calls them."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of names that may be in the checkpoint and are not read; ``*`` is one dotted component, a last ``**`` any rest."""


class Model(Protocol):
    """A built model on one rank: modules with weights, and its op lists."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def carried(self) -> frozenset[str]:
        """State keys that are alive between two layers."""
        ...

    def embed_ops(self) -> Sequence[Op]:
        """Ops before the first layer; they read nothing from the state."""
        ...

    def layer_ops(self, layer: int) -> Sequence[Op]:
        """The ops of one layer, in sequential order."""
        ...

    def head_ops(self) -> Sequence[Op]:
        """Ops after the last layer; they leave one key, ``logits``: [R, vocab] float32 for the batch's ``logit_rows``."""
        ...

    def bind_kv_cache(self, caches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Hands each layer its cache pools, once."""
        ...

    def expert_tensors(self) -> Sequence[ExpertTensors]:
        """Per-expert tensors of every MoE layer, in the order of ``info.moe.layers``."""
        ...


@runtime_checkable
class ExpertReader(Protocol):
    """What a ``Model`` may have besides: it can read its experts from the checkpoint again."""

    def read_expert(self, row: int, logical_expert: int) -> Mapping[str, torch.Tensor]:
        """This rank's part of one expert of MoE layer ``row``: tensors by the names of ``expert_tensors``, without their dim 0."""
        ...


class Checkpoint(Protocol):
    """Lazy tensors of a checkpoint by name; a read touches only the bytes asked for."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype_name(self, name: str) -> str:
        """As safetensors spells it: ``F32``, ``BF16``, ``F8_E4M3``."""
        ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor, or the slice of it, on the CPU in its stored dtype. Marks the name as used."""
        ...

    def unused(self) -> tuple[str, ...]:
        """Names that nobody read (in any slice)."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class MoeParts:
    """What a model's MoE blocks are assembled from; None in ``ModelSpec`` for a dense model."""

    dispatcher: Dispatcher
    experts: Experts
    picker: Picker
    maps: PlacementMaps
    recorder: LoadRecorder
    num_physical_experts: int


@attrs.frozen(kw_only=True, eq=False)
class ModelSpec:
    """What a model is built for on one rank."""

    config: Mapping[str, Any]
    """``config.json`` as found."""
    checkpoint: Checkpoint
    sizes: ParallelSizes
    place: RankPlace
    comms: Comms
    dtype: torch.dtype
    device: torch.device
    attention: Attention
    moe: MoeParts | None
    dense_tp_size: int = 0
    """Tensor split of dense FFN layers: 1 or attn_tp_size; 0 = all ranks where the layer runs on full rows."""
