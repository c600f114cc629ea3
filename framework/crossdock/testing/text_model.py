"""Checkpoint folders without weights: a tiny model's config, a small byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from crossdock.testing.fake_engine import FAKE_VOCAB_SIZE

EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODEL_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""With ``load_format = "random"`` real ranks serve it too, in a second."""
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and runs away from the hounds",
    "a rank sends tokens to experts and takes their sums back in the same order",
    "stop strings may begin in one token and end in another one",
)


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """A BPE over bytes with 256 byte tokens, some merges and the template's special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS, "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_text_model(
    folder: Path,
    *,
    context_tokens: int = 64,
    chat_template: str | None = CHAT_TEMPLATE,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """Writes ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**MODEL_CONFIG, "vocab_size": FAKE_VOCAB_SIZE, "max_position_embeddings": context_tokens}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {"eos_token": EOS}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder
