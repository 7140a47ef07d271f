"""Verbs of the `orchard` command, one file each, loaded lazily."""
