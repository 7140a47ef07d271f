"""Embedded policy servers for a machine without a GPU. Knows nothing of the proxy."""
