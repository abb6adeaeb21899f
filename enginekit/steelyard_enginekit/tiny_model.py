"""Write a tiny random Llama that real vLLM serves: `python -m steelyard_enginekit.tiny_model OUT --seed 0`.

The tokenizer is byte-level without merges: one token is one byte of UTF-8, so any text round-trips and
prompt lengths are easy to choose. The default vocabulary is exactly 256 bytes and 6 special tokens; a wider one
(`--vocabulary 384`) behaves like the padded vocabularies of published models, whose surplus ids the engine
accepts and emits but cannot turn into text. Weights are float32 and drawn wide (standard deviation 0.3), which keeps the
logits far apart: greedy output then depends on the whole prompt and has no near ties, so that token
sequences can be compared for equality between a prefill/decode pair and a solo engine.

The same options and seed give the same files on every machine (NumPy's PCG64 stream). A pair of models with
different seeds is the way to test that a mismatched pair is refused.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file  # type: ignore[import-not-found,unused-ignore]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")
_PAD, _BOS, _EOS = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The shape of the model; KV cache is 2 x layers x kv_heads x head_dim x 4 bytes a token."""

    seed: int = 0
    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = 262
    max_positions: int = 32768


def write_model(directory: Path, shape: TinyModel) -> None:
    """Write config, weights, tokenizer and chat template into `directory`, which is created.

    Raises:
        ValueError: when the vocabulary cannot hold 256 bytes and the special tokens, or heads are
            not a multiple of kv_heads.
    """
    tokenizer = _byte_tokenizer()
    needed = tokenizer.get_vocab_size()
    if shape.vocabulary < needed:
        raise ValueError(f"vocabulary must be at least {needed}, not {shape.vocabulary}")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads ({shape.heads}) must be a multiple of kv_heads ({shape.kv_heads})")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = directory / "model.safetensors"
    save_file(_weights(shape), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it 0600, and an engine in a container is another user
    ends = {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
    _write_json(directory / "config.json", _config(shape) | ends)
    _write_json(directory / "generation_config.json", ends)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[_BOS],
            "eos_token": SPECIAL_TOKENS[_EOS],
            "pad_token": SPECIAL_TOKENS[_PAD],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_positions,
        },
    )


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _weights(shape: TinyModel) -> dict[str, NDArray[np.float32]]:
    """Llama's tensors under the names of the published checkpoints; linear maps are (out, in)."""
    random = np.random.Generator(np.random.PCG64(shape.seed))

    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * 0.3).astype(np.float32)

    def ones() -> NDArray[np.float32]:
        return np.ones(shape.hidden, dtype=np.float32)

    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": normal(query, shape.hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(key_value, shape.hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(key_value, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(shape.hidden, query),
            f"{prefix}.mlp.gate_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.up_proj.weight": normal(shape.intermediate, shape.hidden),
            f"{prefix}.mlp.down_proj.weight": normal(shape.hidden, shape.intermediate),
            f"{prefix}.input_layernorm.weight": ones(),
            f"{prefix}.post_attention_layernorm.weight": ones(),
        }
    tensors |= {
        "model.norm.weight": ones(),
        "lm_head.weight": normal(shape.vocabulary, shape.hidden),
    }
    return tensors


def _config(shape: TinyModel) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="steelyard_enginekit.tiny_model")
    parser.add_argument("directory", type=Path)
    for name, default in ((f, getattr(TinyModel(), f)) for f in TinyModel.__slots__):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N",
                            help=f"default {default}")  # fmt: skip
    options = vars(parser.parse_args(arguments))
    write_model(options.pop("directory"), TinyModel(**options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
