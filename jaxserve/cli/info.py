"""`jaxserve info`: versions, devices, and what a model would need."""
