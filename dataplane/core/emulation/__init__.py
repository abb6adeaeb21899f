"""An engine without a GPU: continuous batching, KV blocks and hand-offs, priced by the engine model."""
