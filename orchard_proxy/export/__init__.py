"""Parquet out, and back in."""
