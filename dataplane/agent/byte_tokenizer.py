"""The tokenizer of emulated models that bring none: one token a byte."""

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
EOS_TOKEN_ID = SPECIAL_TOKENS.index("<|eos|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_PRINTABLE = "abcdefghijklmnopqrstuvwxyz"


def byte_tokenizer_config() -> bytes:
    """Return the tokenizer_config.json that goes with it: one special token names each speaker."""
    return msgspec.json.encode(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL_TOKENS[0],
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "chat_template": _CHAT_TEMPLATE,
        }
    )


def byte_tokenizer() -> Tokenizer:
    """Make a byte-level BPE without merges: 6 special tokens and 256 bytes."""
    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def speakable_ids(tokenizer: Tokenizer, *, vocab_size: int) -> list[int]:
    """Return the ids that an emulated model draws from: text that is whole by itself.

    Of a byte-level vocabulary that is small letters and the space; of others everything that is
    not special.
    """
    letters = [tokenizer.token_to_id(letter) for letter in (*_PRINTABLE, "Ġ")]
    if tokenizer.get_vocab_size() < 1000 and None not in letters:
        return [letter for letter in letters if letter is not None]
    special = set(tokenizer.get_added_tokens_decoder())
    size = min(vocab_size, tokenizer.get_vocab_size())
    return [token_id for token_id in range(size) if token_id not in special]
