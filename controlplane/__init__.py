"""The control plane: the cluster's state in Redis, folded from what agents report."""
