"""Text: tokenizers, chat templates, incremental detokenizing, stop strings."""
