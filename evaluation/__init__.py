"""Workloads, experiments, statistics and reports."""
