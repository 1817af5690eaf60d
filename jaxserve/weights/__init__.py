"""Checkpoints: safetensors, GGUF and Orbax, read straight into (sharded) device arrays."""
