"""The KV cache's bookkeeping: blocks, the prefix index, and per-request tables."""
