"""The router: tokenises, decides, dispatches, relays, accounts."""
