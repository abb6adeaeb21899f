"""The part of Steelyard that lives inside a CPU-only vLLM environment."""
