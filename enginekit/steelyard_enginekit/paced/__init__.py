"""Real vLLM whose steps take as long as the engine model says: docs/paced-engines.md."""
