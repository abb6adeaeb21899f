"""The data plane: routers that place requests and agents that run them."""
