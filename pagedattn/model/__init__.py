"""Models: sources, loaders, families as data, one decoder, batches of tensors."""
