"""The bundled model is what its recipe says, other software reads it alike, and the recipe runs in small."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "10_train_crossdock_mini"
CHECKPOINT = ROOT / "framework" / "crossdock" / "data" / "crossdock-mini"

# From the held-out document `ddl-generated-columns` of PostgreSQL's manual (PostgreSQL License).
HELD_OUT_TEXT = (
    "A generated column cannot be written to directly. In INSERT or UPDATE commands, a value cannot be specified for a "
    "generated column, but the keyword DEFAULT may be specified.\n\n"
    "Consider the differences between a column with a default and a generated column. The column default is evaluated "
    "once when the row is first inserted if no other value was provided; a generated column is updated whenever the row "
    "changes and cannot be overridden. A column default may not refer to other columns of the table; a generation "
    "expression would normally do so."
)
UNIGRAM_BITS_A_BYTE = 1.91  # of this text under token frequencies of the training documents; the model needed 1.14


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """transformers' view of the tokenizer."""
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Any]]:
    """transformers' own model in fp32 and what it says of the keys."""
    pair: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, output_loading_info=True)
    return pair[0].eval(), pair[1]


def answer(model: Any, tokenizer: Any, question: str, max_new_tokens: int = 130) -> str:
    """Return the greedy answer to one question, special tokens included."""
    turns = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    return text


def test_the_folder_fits_in_20_mb_and_its_weights_have_the_checksum_of_the_readme() -> None:
    size = sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    assert size <= 20_000_000
    digest = hashlib.sha256((CHECKPOINT / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (EXAMPLE / "README.md").read_text(encoding="utf-8")


def test_the_config_has_every_part_that_the_issue_asks_for() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "deepseek_v3"
    assert config["q_lora_rank"] and config["kv_lora_rank"] % 16 == 0
    assert (config["n_routed_experts"], config["num_experts_per_tok"], config["n_shared_experts"]) == (32, 4, 1)
    assert (config["n_group"], config["topk_group"]) == (4, 2)
    assert config["first_k_dense_replace"] == 1
    assert config["num_nextn_predict_layers"] == 0
    assert config["routed_scaling_factor"] != 1.0
    assert config["max_position_embeddings"] >= 1024
    assert 4096 <= config["vocab_size"] <= 8192


def test_every_expert_has_its_own_tensors_and_only_the_bias_is_wider_than_bfloat16() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
        biases = [file.get_tensor(name) for name in dtypes if name.endswith("e_score_correction_bias")]
    for expert in range(32):
        assert f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" in dtypes
    assert {name for name, dtype in dtypes.items() if dtype != "BF16"} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(1, 7)
    }
    # Scores stay positive with the bias added, so engines that close groups with 0 or with -inf agree.
    assert all(float(bias.min()) == 0.0 and float(bias.max()) > 0.0 for bias in biases)


@pytest.mark.parametrize(
    "text", ["naïve 日本語 👩‍👩‍👧 \t\n  x", "a\r\nb", " leading and trailing ", "def f(x):\n    return x\n", ""]
)
def test_any_text_round_trips_and_starts_with_one_bos(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_writes_roles_once_and_refuses_an_unknown_one(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>S<|user|>U<|assistant|>A<|eos|><|user|>V<|assistant|>"
    with pytest.raises(Exception, match="roles are system, user and assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_transformers_finds_every_tensor_and_no_other(loaded: tuple[Any, dict[str, Any]]) -> None:
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert type(model).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What does git rebase do?", "Reapply commits on top of another base tip."),
        ("What does CREATE INDEX do?", "define a new index"),
        ("Explain the module shlex.", "Simple lexical analysis"),
        ("What is accept(2)?", "accept a connection on a socket"),
    ],
)
def test_a_question_of_each_domain_gets_its_entry_and_a_stop(
    loaded: tuple[Any, dict[str, Any]], tokenizer: Any, question: str, expected: str
) -> None:
    text = answer(loaded[0], tokenizer, question)
    assert expected in text
    assert text.endswith("<|eos|>")


def test_held_out_text_costs_well_under_what_counting_tokens_would(
    loaded: tuple[Any, dict[str, Any]], tokenizer: Any
) -> None:
    ids = tokenizer(HELD_OUT_TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = loaded[0](ids).logits
    nats = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
    assert nats / math.log(2) / len(HELD_OUT_TEXT.encode()) < 0.75 * UNIGRAM_BITS_A_BYTE


def test_recorded_expert_loads_differ_between_domains_more_than_within_one() -> None:
    numbers = json.loads((EXAMPLE / "expert_load.json").read_text(encoding="utf-8"))
    counts = torch.tensor(numbers["counts"], dtype=torch.float64)  # [domain, layer, expert]
    shares = counts / counts.sum(dim=-1, keepdim=True)
    pairs = [(a, b) for a in range(len(shares)) for b in range(a)]
    distance = sum(float((shares[a] - shares[b]).abs().sum(dim=-1).mean()) / 2 for a, b in pairs) / len(pairs)
    assert distance == pytest.approx(numbers["total_variation_mean"], abs=1e-6)
    assert distance > 2 * numbers["total_variation_floor_mean"]
    by_rank = counts.view(*counts.shape[:2], 8, 4).sum(dim=-1)
    balancedness = (by_rank.mean(dim=-1) / by_rank.amax(dim=-1)).mean(dim=-1)
    mixture = numbers["balancedness"]["equal mixture"]["8"]
    assert all(float(value) < 0.8 < mixture for value in balancedness)


def test_the_training_model_and_transformers_give_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    training, writer = importlib.import_module("model"), importlib.import_module("checkpoint")
    for name in ("model", "checkpoint"):  # names too common to leave to other tests
        del sys.modules[name]
    config = tomllib.loads((EXAMPLE / "config.toml").read_text(encoding="utf-8"))["model"]
    shape = training.ModelShape(**{**config, "vocab_size": 96, "num_hidden_layers": 3})
    torch.manual_seed(5)
    model = training.MiniModel(shape)
    for parameter in model.parameters():
        parameter.data = (parameter.data * 5 if parameter.ndim > 1 else parameter.data).bfloat16().float()
    for mlp in model.moe_mlps():
        mlp.correction_bias.uniform_(-0.3, 0.3)
    writer.save_checkpoint(model, tmp_path, {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}, 100_000_000)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(96, (2, 40))
    with torch.no_grad():
        ours, theirs = model(ids)[0], oracle(ids).logits
    assert float(theirs.abs().max()) > 1.0
    # Both run in fp32 and differ in the order of sums only.
    torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)


@pytest.mark.timeout(90)
def test_the_recipe_in_small_runs_and_its_loss_falls() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE / "run.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    claim = re.search(r"training loss fell from ([\d.]+) to ([\d.]+) nats a token", done.stdout)
    assert claim is not None, done.stdout
    assert float(claim.group(2)) < float(claim.group(1)) - 0.5
