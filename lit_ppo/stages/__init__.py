"""The stages before PPO."""
