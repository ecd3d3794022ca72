"""The byte-level tokenizer of the bundled models: token id = byte value, then special tokens, padded to 272.

python -m training.tokenizer --out replayssm/bundled/qwen3_5-tiny
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

END_OF_TEXT, IM_START, IM_END, PAD = 256, 257, 258, 259
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
VOCAB_SIZE = 272  # a multiple of 16, for the matrix units
RESERVED_TOKENS = [f"<|reserved_{index}|>" for index in range(VOCAB_SIZE - 256 - len(SPECIAL_TOKENS))]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in the `ByteLevel` scheme, in byte order."""
    kept = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


def save_tokenizer(folder: Path, model_max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS + RESERVED_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": SPECIAL_TOKENS[0], "pad_token": SPECIAL_TOKENS[3]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "padding_side": "left",
        "extra_special_tokens": {"im_start_token": SPECIAL_TOKENS[1], "im_end_token": SPECIAL_TOKENS[2]},
        "chat_template": CHAT_TEMPLATE,
        **named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tokenizer files into")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(arguments.out, 8192)


if __name__ == "__main__":
    main()
