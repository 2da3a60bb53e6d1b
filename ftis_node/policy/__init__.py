"""Policy: a language model with its tokenizer, how it samples, and how it scores what others sampled."""

import logging

# peft imports bitsandbytes wherever it is installed, and that warns of a kernel which no node uses.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
