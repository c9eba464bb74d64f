"""The training step by hand: the same loss and gradients as train/objective.py, without an autograd graph."""
