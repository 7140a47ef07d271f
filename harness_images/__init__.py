"""Harnesses as data. Empty until the runner lands."""
