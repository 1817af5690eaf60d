"""The device side: state, step, compiled executables and the runner that owns them."""
