"""Checks of smpar on a machine at hand."""
