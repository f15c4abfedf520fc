"""How long a step, a prefill, a transfer or a weight load takes: measured once (profile), asked by many (predictor)."""
