"""Renders the tables of docs/results-simulator.md from result files."""
