"""Embeddings, scores and ranks: what is made of hidden states, not of tokens."""
