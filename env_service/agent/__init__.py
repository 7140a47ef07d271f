"""What runs inside a sandbox: the standard library only, one process, one thread."""
