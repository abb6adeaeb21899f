"""A virtual-time cluster that runs the router's own scheduler."""
