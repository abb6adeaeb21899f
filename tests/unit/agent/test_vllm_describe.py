"""What decides whether two vLLM engines may hand KV to each other."""

import json
from dataclasses import replace

import pytest

from dataplane.agent.vllm_describe import (
    Fallbacks,
    ModelFiles,
    describe_vllm,
    read_models,
    read_server_info,
)
from dataplane.agent.vllm_metrics import read_metrics

SAMPLE = read_metrics(
    "process_start_time_seconds 17.5\n"
    'vllm:cache_config_info{block_size="128",kv_cache_size_tokens="65536"} 1.0\n'
)
FALLBACKS = Fallbacks(
    dtype="auto", max_num_seqs=256, max_batched_tokens=2048, lease_seconds=30.0, profile=""
)


def info(**changes):
    """A /server_info answer; keys are section__field."""
    config = {
        "model_config": {"dtype": "torch.float32", "quantization": None},
        "cache_config": {"block_size": 128, "cache_dtype": "auto", "kv_cache_size_tokens": 65536},
        "parallel_config": {"tensor_parallel_size": 1},
        "scheduler_config": {"max_num_seqs": 16, "max_num_batched_tokens": 2048},
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "engine_id": "boot-1",
            "kv_connector_extra_config": {},
        },
        "instance_id": "77",
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        config[section][field] = value
    return read_server_info(json.dumps({"vllm_config": config}).encode())


def describe(config=None, version="0.32.0", root="/nowhere", model="tiny", **fallbacks):
    """The description of a server."""
    models = {"data": [{"id": model, "root": root, "max_model_len": 2048}]}
    return describe_vllm(
        model=read_models(json.dumps(models).encode()),
        version=version,
        config=config,
        sample=SAMPLE,
        files=ModelFiles(root),
        fallbacks=replace(FALLBACKS, **fallbacks),
    )


def test_two_boots_of_one_engine_pair_and_differ_in_epoch():
    """The pairing key is of the layout, the epoch of the boot."""
    one = describe(info())
    two = describe(info(kv_transfer_config__engine_id="boot-2"))

    assert one.pairing_key == two.pairing_key
    assert (one.epoch, two.epoch) == ("boot-1", "boot-2")


@pytest.mark.parametrize(
    "change",
    [
        {"cache_config__block_size": 64},
        {"model_config__dtype": "torch.bfloat16"},
        {"cache_config__cache_dtype": "fp8"},
        {"model_config__quantization": "awq"},
        {"parallel_config__tensor_parallel_size": 2},
        {"kv_transfer_config__kv_connector": "ExampleConnector"},
        {"kv_transfer_config__kv_connector_extra_config": {"bidirectional_kv_xfer": True}},
    ],
)
def test_another_layout_has_another_pairing_key(change):
    """Block size above all: NIXL accepts two sizes and the tokens are wrong."""
    assert describe(info(**change)).pairing_key != describe(info()).pairing_key


def test_another_model_or_version_has_another_pairing_key():
    """The served name and the engine's version are part of the key."""
    keys = {
        describe(info()).pairing_key,
        describe(info(), model="other").pairing_key,
        describe(info(), version="0.33.0").pairing_key,
    }

    assert len(keys) == 3


def test_the_lease_is_what_the_connector_was_told():
    """kv_lease_duration wins over the setting, and does not keep engines apart."""
    told = describe(info(kv_transfer_config__kv_connector_extra_config={"kv_lease_duration": 10}))

    assert told.lease_seconds == 10.0
    assert describe(info()).lease_seconds == 30.0
    assert told.pairing_key == describe(info()).pairing_key


def test_a_slowed_engine_is_described_in_the_time_that_its_agent_counts():
    """Its own lease is real seconds; its KV may be sized as of the model that it stands in for."""
    told = info(kv_transfer_config__kv_connector_extra_config={"kv_lease_duration": 90})

    engine = describe(told, clock_rate=1 / 3, kv_bytes_per_token=36_864)

    assert engine.lease_seconds == pytest.approx(30.0)
    assert engine.kv_bytes_per_token == 36_864


def test_without_dev_mode_metrics_and_settings_answer():
    """A server that hides its configuration is described by what is left."""
    engine = describe(None)

    assert engine.epoch == "start-17.5"
    assert (engine.block_tokens, engine.kv_total_tokens) == (128, 65536)
    assert (engine.max_num_seqs, engine.dtype) == (256, "auto")


def test_the_models_files_give_vocabulary_kv_size_and_revision(tmp_path):
    """config.json next to the weights says what no endpoint does; other weights, other revision."""
    config = {
        "vocab_size": 262,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    engine = describe(info(), root=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    other = describe(info(), root=str(tmp_path))

    assert (engine.vocab_size, engine.kv_bytes_per_token) == (262, 1024)
    assert len(engine.tokenizer_sha256) == 64
    assert engine.model_revision != other.model_revision
    assert engine.pairing_key != other.pairing_key
