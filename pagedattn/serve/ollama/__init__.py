"""Ollama's routes, translated to chats, completions and embeddings."""
