"""From raw events to tokens."""

from .spiking_patches import Tokenizer, Tokens, tokenize

__all__ = ["Tokenizer", "Tokens", "tokenize"]
