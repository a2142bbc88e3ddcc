"""The forecast: peak memory by GPU, role and phase, from a configuration alone. No GPU, no weights."""
