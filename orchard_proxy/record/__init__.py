"""The journal, what is derived from it, and the catalog."""
