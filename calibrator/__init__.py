"""Measures what a token costs on a cluster and publishes it."""
