"""``crossdock logits``: logits of every position of a list of prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crossdock.cli.flags import ConfigFlags
from crossdock.cli.token_files import check_output, read_ids, write_json
from crossdock.errors import RuntimeFault
from crossdock.launch.rank_logs import set_up_logs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NO_FLAGS = ConfigFlags()


def logits(
    model: Path | None = None, /, *, ids: Path, out: Path, receipt: Path | None = None, flags: ConfigFlags = _NO_FLAGS
) -> None:
    """Write the logits of every position of a list of prompts.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint; without it the bundled crossdock-mini.
    ids
        JSON file: a list of lists of token ids, of any lengths from 1 on.
    out
        NPZ file for arrays logits_0, logits_1, ..., each [length, vocab] float32, in the order of the prompts.
    receipt
        JSON file for what was chosen and how often each mode ran.
    """
    set_up_logs(rank=None, log_file=None, level=logging.WARNING)
    config = flags.load(model).config
    prompts = read_ids(ids)
    check_output(out)
    check_output(receipt, "--receipt")
    from crossdock.host_memory import bound_kernel_caches, keep_freed_memory
    from crossdock.offline import logits_job, run_job

    keep_freed_memory()
    bound_kernel_caches()
    result = run_job(logits_job(config.checkpoint.path, prompts, config))
    write_arrays(out, result.ordered_logits())
    if receipt is not None:
        write_json(receipt, result.receipt)


def write_arrays(path: Path, arrays: Sequence[npt.NDArray[np.float32]]) -> None:
    """``arrays`` as logits_0, logits_1, ... under exactly this name."""
    import numpy as np

    try:
        with path.open("wb") as file:
            np.savez(file, **{f"logits_{index}": array for index, array in enumerate(arrays)})  # type: ignore[arg-type]
    except OSError as error:
        raise RuntimeFault(f"--out {str(path)!r} cannot be written: {error.strerror or error}") from error
