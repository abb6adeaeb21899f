"""OpenAI engines that cost next to nothing: prefill and decode legs, paced streams, what agents ask.

`python -m benchmarks.mock_engine MODEL_FOLDER INTERVAL_MS TOKENS PORT…`: one process, an engine a port. Text is
made up; a stream has TOKENS events, INTERVAL_MS apart, each stream with a phase of its own. A request that asks
for a hand-off (`do_remote_decode`) gets one that fits its prompt.
"""

import asyncio
import random
import sys
from typing import Any

import httptools
import msgspec
import uvloop

BLOCK_TOKENS = 16
MODEL = "m"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_EVENT = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":%b,"stop_reason":null%b}]}\n\n'
_USAGE = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m","choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
_DONE = b"data: [DONE]\n\n"


class Body(msgspec.Struct):
    """What is read of a request."""

    prompt: Any = None
    max_tokens: int = 16
    stream: bool = False
    return_token_ids: bool = False
    stream_options: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Engine:
    """One engine's answers."""

    def __init__(self, name: str, folder: str, interval_seconds: float, tokens: int) -> None:
        self.name = name
        self.folder = folder
        self.interval_seconds = interval_seconds
        self.tokens = tokens
        self.decoder = msgspec.json.Decoder(Body)

    def get(self, path: str) -> bytes:
        """Answer what agents and routers ask before any request."""
        if path.startswith("/v1/models"):
            row = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm"}
            row |= {"root": self.folder, "max_model_len": 32_768}
            return msgspec.json.encode({"object": "list", "data": [row]})
        if path.startswith("/version"):
            return b'{"version":"0.32.0"}'
        if path.startswith("/server_info"):
            return msgspec.json.encode(
                {
                    "vllm_config": {
                        "model_config": {"dtype": "bfloat16"},
                        "cache_config": {"block_size": BLOCK_TOKENS},
                        "scheduler_config": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192},
                        "kv_transfer_config": {
                            "kv_connector": "NixlConnector",
                            "engine_id": self.name,
                        },
                    }
                }
            )
        if path.startswith("/metrics"):
            return (
                b"process_start_time_seconds 1.0\n"
                b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
                b'vllm:kv_cache_usage_perc{engine="0"} 0.0\n'
                b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1\n'
            )
        return b'{"status":"ok","model_path":"m","served_model_name":"m","version":"0.32.0"}'

    def whole(self, body: Body) -> bytes:
        """Return a whole answer: a prefill leg's, or one of a single token."""
        prompt = len(body.prompt) if isinstance(body.prompt, list) else 32
        answer: dict[str, Any] = {
            "id": "cmpl-0123456789abcdef",
            "object": "text_completion",
            "created": 1_700_000_000,
            "model": MODEL,
            "choices": [{"index": 0, "text": " tok", "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": prompt, "total_tokens": prompt + 1, "completion_tokens": 1},
        }
        if body.kv_transfer_params and body.kv_transfer_params.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [list(range(-(-prompt // BLOCK_TOKENS)))],
                "remote_engine_id": self.name,
                "remote_request_id": "r1",
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "remote_num_tokens": prompt,
                "tp_size": 1,
            }
        return msgspec.json.encode(answer)


class Connection(asyncio.Protocol):
    """One client of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.transport: Any = None
        self.left = 0
        self.wants = Body()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.body = b"", b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"GET":
            self.send(self.engine.get(self.url.decode()))
            return
        body = self.wants = self.engine.decoder.decode(self.body)
        if not body.stream:
            self.send(self.engine.whole(body))
            return
        self.left = min(self.engine.tokens, body.max_tokens)
        loop = asyncio.get_running_loop()
        # A phase of its own for each stream, as requests that come at random have.
        first = self.engine.interval_seconds * random.random() if self.left > 1 else 0.0
        self.due = loop.time() + first
        head = _HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"
        self.transport.write(head)
        loop.call_at(self.due, self.step)

    def send(self, content: bytes) -> None:
        head = _HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(content)
        self.transport.write(head + content)

    def step(self) -> None:
        if self.transport.is_closing():
            return
        self.left -= 1
        ids = b',"token_ids":[9]' if self.wants.return_token_ids else b""
        event = _EVENT % (b"null" if self.left else b'"length"', ids)
        if not self.left:
            prompt = len(self.wants.prompt) if isinstance(self.wants.prompt, list) else 32
            made = min(self.engine.tokens, self.wants.max_tokens)
            if self.wants.stream_options:
                event += _USAGE % (prompt, prompt + made, made)
            event += _DONE
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        self.transport.write(chunk if self.left else chunk + b"0\r\n\r\n")
        if self.left:
            self.due += self.engine.interval_seconds
            asyncio.get_running_loop().call_at(self.due, self.step)


async def main(folder: str, interval_seconds: float, tokens: int, ports: list[int]) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    for port in ports:
        engine = Engine(f"engine-{port}", folder, interval_seconds, tokens)
        await loop.create_server(lambda e=engine: Connection(e), "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(
        main(
            sys.argv[1],
            float(sys.argv[2]) / 1000,
            int(sys.argv[3]),
            [int(port) for port in sys.argv[4:]],
        )
    )
