"""The command line: `jaxserve generate | chat | bench | info | convert`."""
