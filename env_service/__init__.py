"""Sandboxes. Empty until the runner lands."""
