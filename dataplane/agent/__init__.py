"""The agent beside one engine."""
