"""Language models for jaxsample: a Flax NNX decoder, its loaders and its text side.

Knows nothing of sampling; jaxsample itself never imports this package.
"""
