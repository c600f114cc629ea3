"""Train the byte-level BPE tokenizer on the corpus and encode the corpus with it.

    python train_tokenizer.py --work build/mini --vocab-size 6144

Result: `WORK/tokenizer/` (`tokenizer.json`, `tokenizer_config.json` with the chat template) and `WORK/tokens/`: for each
domain and for chat one `NAME.train.bin` and `NAME.val.bin` (uint16 token ids), and for chat the starts of conversations
as `chat.SPLIT.starts.bin` (uint32).
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [BOS, EOS, PAD, *(f"<|{role}|>" for role in ROLES)]
DOMAINS = ("python", "git", "man", "sql")
CONTEXT_TOKENS = 2048
VALIDATION_ONE_IN = 40
SEED = 20261130
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `vocab_size` entries: any text round-trips, a text starts with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [f"<|{role}|>" for role in ROLES],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def conversation_text(turns: list[list[str]]) -> str:
    """Return one conversation as the chat template writes it."""
    parts = [f"<|{role}|>{text}{EOS if role == 'assistant' else ''}" for role, text in turns]
    return BOS + "".join(parts)


def documents(corpus: Path, domain: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text with BOS and EOS) of one domain or of `chat`."""
    with (corpus / f"{domain}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if domain == "chat":
                yield line, conversation_text(record)
            else:
                yield record["name"], f"{BOS}{record['text']}{EOS}"


def is_validation(name: str) -> bool:
    """Tell whether a document is held out; depends on its name only."""
    return zlib.crc32(name.encode()) % VALIDATION_ONE_IN == 0


def encode(tokenizer: Tokenizer, corpus: Path, tokens: Path) -> None:
    """Write the token files of every domain; documents are shuffled with a fixed seed."""
    tokens.mkdir(exist_ok=True)
    for domain in (*DOMAINS, "chat"):
        named = list(documents(corpus, domain))
        random.Random(SEED).shuffle(named)
        for split in ("train", "val"):
            texts = [text for name, text in named if is_validation(name) == (split == "val")]
            encoded = [item.ids for item in tokenizer.encode_batch(texts, add_special_tokens=False)]
            ids = np.fromiter((token for item in encoded for token in item), dtype=np.uint16)
            ids.tofile(tokens / f"{domain}.{split}.bin")
            if domain == "chat":
                starts = np.cumsum([0, *(len(item) for item in encoded[:-1])]).astype(np.uint32)
                starts.tofile(tokens / f"{domain}.{split}.starts.bin")
            size = sum(len(text.encode()) for text in texts)
            print(f"{domain}.{split}: {len(texts)} texts, {len(ids)} tokens, {size / len(ids):.2f} bytes a token")


def main() -> None:
    """Train, save and encode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder of prepare_data.py")
    parser.add_argument("--vocab-size", type=int, default=6144)
    options = parser.parse_args()
    corpus = options.work / "corpus"
    texts = (text for domain in (*DOMAINS, "chat") for _, text in documents(corpus, domain))
    tokenizer = train(texts, options.vocab_size)
    save(tokenizer, options.work / "tokenizer")
    encode(tokenizer, corpus, options.work / "tokens")


if __name__ == "__main__":
    main()
