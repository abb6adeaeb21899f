"""Requests of all shapes, made from a seed."""

from random import Random

from steelyard.v1 import router_pb2


def ids_request(ids, max_tokens: int = 8, **fields) -> router_pb2.GenerateRequest:
    """Return a request with token ids."""
    return router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=ids), max_tokens=max_tokens, **fields
    )


def mixed_requests(
    count: int, seed: int = 0, *, longest: int = 1_600, vocabulary: int = 384
) -> list[router_pb2.GenerateRequest]:
    """Return requests of 3 to `longest` prompt tokens and 8 to 64 out; a third share a prefix."""
    rng = Random(seed)
    prefix = [rng.randrange(6, vocabulary) for _ in range(200)]
    messages = []
    for number in range(count):
        length = round(3 * (longest / 3) ** rng.random())
        ids = [rng.randrange(6, vocabulary) for _ in range(length)]
        if number % 3 == 0 and length < longest - len(prefix):
            ids = prefix + ids
        message = ids_request(ids, rng.randint(8, 64))
        if number % 4 == 0:
            message.sampling.ignore_eos = True
        if number % 5 == 0:
            message.sampling.temperature = 0.8
            message.sampling.seed = number
        if number % 7 == 0:
            message.sampling.min_tokens = 4
        messages.append(message)
    return messages
