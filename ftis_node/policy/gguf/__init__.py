"""GGUF files, as llama.cpp, Ollama and LM Studio keep models: read with care, and turned once into folders."""
