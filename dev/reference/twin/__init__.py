"""PyTorch twin of the trainer: the same mathematics, written a second time."""
