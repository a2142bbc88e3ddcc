"""The mathematics of PPO as pure functions: no model, no trainer, no process group.

Shapes: B sequences, R response width (right-padded), V vocabulary. `mask` is (B, R), bool or 0/1, and decided by the
caller. What lies off the mask may be anything, NaN and infinity included: it is replaced by 0 before it is used, so it
reaches neither a value nor a gradient. float16 and bfloat16 are computed in float32; float64 stays float64.

`reduce`, where a function takes it, sums a tensor over all ranks and returns the sum; None is one rank.
"""
