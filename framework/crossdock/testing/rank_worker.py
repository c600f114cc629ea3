"""The process behind one rank of a ``RankPool``: joins gloo, then runs what the pool sends until the pool is gone."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import attrs

GROUP_TIMEOUT_S = 300.0


@attrs.frozen(kw_only=True)
class FunctionRef:
    """A top-level function by module, file and name: test modules are often not importable by name."""

    module: str
    path: str
    name: str

    @staticmethod
    def of(function: Callable[..., Any]) -> FunctionRef:
        """Raises ``ValueError`` for a function that another process cannot find."""
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not at the top level of its module; ranks cannot find it")
        path = inspect.getfile(function)
        is_script = function.__module__ == "__main__"
        return FunctionRef(
            module=Path(path).stem if is_script else function.__module__, path=path, name=function.__qualname__
        )

    def load(self) -> Callable[..., Any]:
        """The function in this process; its module is imported by name, else from its file under the same name."""
        if self.module not in sys.modules:
            try:
                importlib.import_module(self.module)
            except ImportError:
                load_file(self.module, self.path)
        found: Any = sys.modules[self.module]
        for part in self.name.split("."):
            found = getattr(found, part)
        return cast("Callable[..., Any]", found)


@attrs.frozen(kw_only=True)
class RankCall:
    """What the pool asks of every rank. ``args`` stay pickled until the function's module is there."""

    function: FunctionRef
    args: bytes


@attrs.frozen(kw_only=True)
class CallFailed:
    """Answer of a rank on which the function raised."""

    traceback: str


def load_file(module: str, path: str) -> None:
    """Imports a file as ``module``."""
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {module} from {path}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)


def main() -> None:
    """Arguments: RANK SIZE CHANNEL_FD LIFELINE_FD STORE_FILE DEVICE."""
    rank, size, channel_fd, lifeline = (int(argument) for argument in sys.argv[1:5])
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    channel = Connection(channel_fd)
    try:
        context = _join(rank, size, Path(sys.argv[5]), sys.argv[6])
    except Exception:  # noqa: BLE001 - whatever it is, the pool tells it
        channel.send(CallFailed(traceback=traceback.format_exc()))
        return
    channel.send(None)
    while True:
        try:
            call = channel.recv()
        except EOFError:
            return
        _answer(channel, call, context)


def ranks_per_gpu(ranks: int, num_gpus: int) -> int:
    """1 where there are GPUs enough; else neighbours share, the last GPU perhaps with fewer of them."""
    return -(-ranks // max(1, num_gpus))


def _answer(channel: Connection, call: RankCall, context: Any) -> None:
    try:
        function = call.function.load()
        result = function(context, *pickle.loads(call.args))
        answer = pickle.dumps(result)
    except BaseException:  # noqa: BLE001 - pytest's failures are no Exception
        channel.send(CallFailed(traceback=traceback.format_exc()))
    else:
        channel.send_bytes(answer)


def _end_with_parent(lifeline: int) -> None:
    """The pool's end of the pipe closes when its process ends, even by SIGKILL."""
    os.read(lifeline, 1)
    os._exit(1)


def _join(rank: int, size: int, store_file: Path, device: str) -> Any:
    import torch
    from torch._C._distributed_c10d import FileStore

    from crossdock.comm import RankComms, create_comms, join_process_group, take_device
    from crossdock.testing.world import RankContext
    from crossdock.types.parallel import ParallelSizes

    torch.set_num_threads(1)
    store = FileStore(str(store_file), size)
    sharing = ranks_per_gpu(size, torch.cuda.device_count()) if device == "cuda" else 1
    take_device(device, rank, sharing)
    join_process_group(rank=rank, ranks=size, store=store, device_type=device, timeout_s=GROUP_TIMEOUT_S)
    known: dict[ParallelSizes, RankComms] = {}

    def comms_of(sizes: ParallelSizes) -> RankComms:
        if sizes not in known:
            known[sizes] = create_comms(sizes, rank, device)
        return known[sizes]

    return RankContext(rank=rank, size=size, comms_of=comms_of, device=device, ranks_per_gpu=sharing)
