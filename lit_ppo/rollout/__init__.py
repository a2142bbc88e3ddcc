"""Rollout engines: how responses are sampled with the actor's own weights."""
