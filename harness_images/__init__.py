"""Harnesses as data: a folder with a `harness.toml` says how an agent program is installed, launched and read.

Of the proxy this package knows the schema alone. What it reads and decides is pure (`manifest`, `fields`, `checks`,
`template`, `result`, `python_spec`); what touches the disk is `registry`, `install` and `interpreters`.
"""
