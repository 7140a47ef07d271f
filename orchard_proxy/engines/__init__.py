"""Policy servers: the fields to add for evidence, how to strip them again, how to read them. Pure: no I/O."""
