"""Experiments: each lists the cells of one table or figure."""
