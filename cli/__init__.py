"""The steelyard command."""
