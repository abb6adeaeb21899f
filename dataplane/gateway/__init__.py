"""The gateway: the OpenAI API over HTTP in front of a router, in the router's own process."""
