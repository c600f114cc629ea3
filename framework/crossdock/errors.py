"""Every exception of Crossdock, in one tree.

::

    CrossdockError                      one sentence: what was asked, what was found, what to do
    |-- UsageError                      exit code 2: the user can fix it before anything runs
    |   |-- ConfigError                 the configuration cannot be used
    |   |   |-- ConfigFileError         the file is missing, no file, or not TOML
    |   |   |-- ConfigValueError        values or keys are wrong; all of them are listed
    |   |   |-- SelectionRefused        the chosen plugins cannot work together; carries the refusals
    |   |   `-- CapacityTooSmall        a limit cannot be satisfied; carries the number that is needed
    |   |-- PluginError                 a plugin cannot be found or loaded (registry order)
    |   |   |-- UnknownPlugin           1  no entry point of that name
    |   |   |-- DuplicatePlugin         2  two distributions provide the name
    |   |   |-- PluginImportFailed      3  the module raised at import
    |   |   |-- WrongHookApiVersion     4  written for another hook API
    |   |   |-- UnknownHook             5  a hook or an argument that the point does not have
    |   |   |-- NoHookImplemented       6  the point's ``make_*`` hook is missing
    |   |   |-- PluginDeclined          the hook returned None
    |   |   `-- WrongPluginResult       the hook returned something that is not what the point needs
    |   |-- CheckpointError             files or tensors of a checkpoint do not fit
    |   `-- LoadFileError               a load, placement or trace file cannot be read
    |-- RequestError                    a request is refused (HTTP 4xx); names the field and the rule
    |   `-- OverloadedError             try again later (HTTP 429 or 503)
    |-- RuntimeFault                    exit code 1: it broke while running
    |   |-- AgreementError              ranks disagree about plugins, options or a step
    |   |-- ExchangeTimeout             ranks did not arrive at a step in time
    |   |-- RankLost                    a rank process ended or was stopped
    |   |-- PoolExhausted               no free KV page where one must be
    |   `-- TransferFailed              an expert or weight transfer failed and was rolled back
    `-- MisuseError                     a contract of hook API 1 was broken by code, not by input
        |-- RowsMisuse                  an owed sum used as complete, taken twice or lost
        |-- DispatchMisuse              dispatcher calls out of order, a slot reused, a wrong shape
        |-- OpStateError                an op read an absent key or wrote a live one
        |-- BatchSplitError             a batch field cannot be split
        `-- InvalidPlacement            an expert without a replica, or a slot without an expert
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class CrossdockError(Exception):
    """Root of the tree. ``str(error)`` is one sentence for a user; ``exit_code`` is the process's."""

    exit_code: ClassVar[int] = 1


class UsageError(CrossdockError):
    """Wrong input that the user can fix before anything runs."""

    exit_code: ClassVar[int] = 2


class ConfigError(UsageError):
    """The configuration cannot be used."""


class ConfigFileError(ConfigError):
    """The configuration file is missing, is not a file, or is not TOML."""


class ConfigValueError(ConfigError):
    """Values or keys of the configuration are wrong. ``problems`` lists each with its path."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class SelectionRefused(ConfigError):
    """The chosen plugins cannot work together or on this machine. ``codes`` are machine-readable, in the order of the sentences."""

    def __init__(self, codes: Sequence[str], sentences: Sequence[str]) -> None:
        self.codes = tuple(codes)
        self.sentences = tuple(sentences)
        super().__init__("; ".join(f"{sentence} [{code}]" for code, sentence in zip(codes, sentences, strict=True)))


class CapacityTooSmall(ConfigError):
    """A limit cannot be satisfied; ``needed`` is the number that would do."""

    def __init__(self, message: str, *, needed: int) -> None:
        self.needed = needed
        super().__init__(message)


class PluginError(UsageError):
    """A plugin cannot be found, loaded or built."""


class UnknownPlugin(PluginError):
    """No installed entry point of this point has the name."""


class DuplicatePlugin(PluginError):
    """Two distributions provide the same name in one point; neither is loaded."""


class PluginImportFailed(PluginError):
    """The plugin's module raised at import; the cause is chained."""


class WrongHookApiVersion(PluginError):
    """The plugin states another hook API version, or none."""


class UnknownHook(PluginError):
    """The plugin implements a hook, or takes an argument, that the point does not have."""


class NoHookImplemented(PluginError):
    """The plugin does not implement the point's ``make_*`` hook."""


class PluginDeclined(PluginError):
    """The plugin's hook returned None for this spec."""


class WrongPluginResult(PluginError):
    """The plugin's hook returned an object without the methods of the point's protocol."""


class CheckpointError(UsageError):
    """A checkpoint's files, config or tensors do not fit; everything found is listed."""


class LoadFileError(UsageError):
    """A load, placement or trace file cannot be read; names path, key and shape."""


class RequestError(CrossdockError):
    """A request is refused. ``field`` names the parameter, None where there is no single one."""

    def __init__(self, message: str, *, field: str | None = None, http_status: int = 400) -> None:
        self.field = field
        self.http_status = http_status
        super().__init__(message)


class OverloadedError(RequestError):
    """Refused for now: queue full (429), or starting or draining (503)."""

    def __init__(self, message: str, *, retry_after_s: int = 1, http_status: int = 429) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, http_status=http_status)


class RuntimeFault(CrossdockError):
    """It broke while running."""


class AgreementError(RuntimeFault):
    """Ranks disagree; ``odd_ranks`` hold another value of ``field`` than the majority."""

    def __init__(self, message: str, *, odd_ranks: Sequence[int] = (), field: str = "") -> None:
        self.odd_ranks = tuple(odd_ranks)
        self.field = field
        super().__init__(message)


class ExchangeTimeout(RuntimeFault):
    """``missing_ranks`` did not arrive at a step in time."""

    def __init__(self, message: str, *, missing_ranks: Sequence[int] = ()) -> None:
        self.missing_ranks = tuple(missing_ranks)
        super().__init__(message)


class RankLost(RuntimeFault):
    """A rank process ended or was stopped; ``rank`` is the culprit where it is known."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class PoolExhausted(RuntimeFault):
    """No free KV page is left where the scheduler had promised one."""


class TransferFailed(RuntimeFault):
    """A transfer of expert tensors failed; the old placement is still in force."""


class MisuseError(CrossdockError):
    """Code broke a contract of the hook API; a mistake of a plugin's or of ours, never of a user's input."""


class RowsMisuse(MisuseError):
    """A tensor that owes a sum was used as complete, or a sum was taken twice."""


class DispatchMisuse(MisuseError):
    """Dispatcher calls out of order, a slot in use, more rows than the capacity, or a wrong shape or dtype."""


class OpStateError(MisuseError):
    """An op read an absent key, wrote a live one, or a layer left other keys than it declares."""


class BatchSplitError(MisuseError):
    """A batch field has no split rule or refuses to be split."""


class InvalidPlacement(MisuseError):
    """A placement misses a logical expert, leaves a slot empty, or its maps contradict each other."""
