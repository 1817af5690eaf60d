"""Where an engine lives: jax's first device, or why there is none."""

from __future__ import annotations

import jax

from jaxserve.errors import ConfigError


def default_device() -> jax.Device:
    """jax's first device.

    Raises:
        ConfigError: jax cannot start the platform that it was told to use, or found.
    """
    return all_devices()[0]


def all_devices() -> list[jax.Device]:
    """jax's devices. Errors: as `default_device`."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, for cuda without its plugin
        wanted = jax.config.jax_platforms
        said = f"JAX_PLATFORMS={wanted}" if wanted else "the platform that it has found"
        why = " ".join(str(error).split())[:400] or "nothing for it is installed"
        raise ConfigError(f"jax cannot use {said}: {why}; install jax for that platform (see README.md), or set "
                          f"JAX_PLATFORMS=cpu") from error
