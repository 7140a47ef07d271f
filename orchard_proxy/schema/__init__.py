"""Shared types and the one list of columns. The leaf that every package may import; imports nothing of ours."""
