"""The command ``smpar``: one file for each of its commands, listed in `smpar.cli.main`."""
