"""Export of a checkpoint as a folder that plain transformers, or plain peft, can load."""
