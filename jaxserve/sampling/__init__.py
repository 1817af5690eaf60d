"""Logits to ids, on the device: per-slot options, processors, the sampler and logprobs."""
