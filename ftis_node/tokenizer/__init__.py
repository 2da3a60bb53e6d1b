"""Tokenizers: which of them read one another's ids, and how text with claims becomes another tokenizer's tokens."""
