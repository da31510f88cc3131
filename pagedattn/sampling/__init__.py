"""From logits to tokens: masks, penalties, filters, one draw, log-probabilities.

Knows nothing of blocks, plans or text. Every token is a pure function of its row of
logits, its request's parameters and tokens, and (seed, sibling, position).
"""
