"""`python -m jaxserve` is the `jaxserve` command."""

from jaxserve.cli.main import main

if __name__ == "__main__":
    main()
