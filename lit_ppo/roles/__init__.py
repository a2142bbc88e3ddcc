"""The models of PPO: loading, adapters, log-probs and values of response tokens."""
