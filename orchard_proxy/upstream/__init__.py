"""Connections to policy servers."""
