"""Fast reinforcement learning of language models on OpenRLHF, without changing what the model learns."""

__version__ = "0.1.0"
