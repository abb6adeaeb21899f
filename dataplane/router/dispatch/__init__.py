"""One dispatcher a pool, many front ends: lease, links, hub."""
