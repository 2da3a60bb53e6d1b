"""Policy: a language model with its tokenizer, how it samples, and how it scores what others sampled."""
