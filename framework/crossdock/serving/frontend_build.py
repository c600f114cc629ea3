"""The frontend from configuration and checkpoint folder: socket, tokenizer, template, engine client, API keys."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import crossdock
from crossdock.config import Config
from crossdock.config_render import config_tables, resolved_config
from crossdock.errors import ConfigFileError, RuntimeFault
from crossdock.groups import leader_ranks
from crossdock.option_defaults import with_plugin_defaults
from crossdock.rank_plan import RankPlan
from crossdock.serving.chat_template import load_chat_template
from crossdock.serving.control_calls import RankSender
from crossdock.serving.engine_client import EngineClient
from crossdock.serving.frontend import Frontend
from crossdock.serving.metrics import ServerMetrics
from crossdock.serving.model_facts import read_model_facts
from crossdock.serving.replicas import Replica
from crossdock.serving.router import make_router
from crossdock.serving.start_lines import say
from crossdock.serving.tokenizer import load_tokenizer


def bind_http_socket(host: str, port: int) -> socket.socket:
    """The listening socket of the server, bound first so that a port in use is told within a second.

    Raises:
        RuntimeFault: the port is in use, or the host is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        message = f"the server cannot listen on {host} port {port}: {error.strerror}; choose another one with --port"
        raise RuntimeFault(message) from error
    return listener


def make_frontend(config: Config, plan: RankPlan, sender: RankSender) -> Frontend:
    """The frontend of a job whose ranks are about to start; ``sender`` reaches them."""
    folder = plan.folder
    model_id = config.server.served_model_name or folder.resolve().name
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, {} if tokenizer is None else tokenizer.config)
    if tokenizer is None:
        say(f"warning: {folder} has no tokenizer.json, so only prompts of token ids are served")
    elif template.problem is not None:
        say(f"warning: {template.problem.removeprefix('messages: ')}")
    sizes = plan.sizes
    leaders = leader_ranks(sizes)
    metrics = ServerMetrics(model_id, sizes.attn_dp_size)
    engine = EngineClient(
        sender=sender,
        num_ranks=sizes.ranks,
        replicas=tuple(Replica(attn_dp_rank=index, leader=leader) for index, leader in enumerate(leaders)),
        router=make_router(config.server.router),
        max_in_flight_per_replica=config.scheduler.max_running_requests + config.scheduler.max_queued_requests,
        on_outputs=lambda replica, _: metrics.replica_reported(replica),
    )
    return Frontend(
        model=read_model_facts(
            folder, model_id=model_id, max_sequence_tokens=plan.max_sequence_tokens, created=int(time.time())
        ),
        tokenizer=tokenizer,
        chat_template=template,
        engine=engine,
        metrics=metrics,
        info={"version": crossdock.__version__, "config": config_tables(resolved_config(with_plugin_defaults(config)))},
        api_keys=read_api_keys(config.server.api_key_file),
        max_body_bytes=config.server.max_body_mib * 2**20,
    )


def read_api_keys(path: str) -> frozenset[str]:
    """Keys of ``server.api_key_file``, one a line; none for an empty path.

    Raises:
        ConfigFileError: the file cannot be read or holds no key: a server that was meant to be closed must not open.
    """
    if not path:
        return frozenset()
    try:
        keys = {line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()} - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"server.api_key_file {path!r} cannot be read: {error}") from error
    if not keys:
        raise ConfigFileError(f"server.api_key_file {path!r} holds no key; write one a line")
    return frozenset(keys)
