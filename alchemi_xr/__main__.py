"""``python -m alchemi_xr``: the command line of this very interpreter."""

from alchemi_xr.cli.main import main

if __name__ == "__main__":
    main()
