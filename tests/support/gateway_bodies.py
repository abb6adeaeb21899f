"""Short ways to say what is asked of a gateway."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
FIXED = {"temperature": 0, "ignore_eos": True}


def completion(**fields):
    """A body for /v1/completions."""
    return {"model": "tiny", "prompt": "hi", "max_tokens": 5} | FIXED | fields


def chat(**fields):
    """A body for /v1/chat/completions."""
    return {"model": "tiny", "messages": HI, "max_tokens": 5} | FIXED | fields
