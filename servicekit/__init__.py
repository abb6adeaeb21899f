"""Plumbing that every service uses."""
